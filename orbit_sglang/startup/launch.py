"""This module starts a server with slots: the checkpoint must be sound, and every process must prove its hooks."""

import socket
from collections.abc import Callable
from typing import Any

from orbit_kernels.upstream.ledger import NotInPlaceError
from orbit_sglang.control.messages import INIT_INFO_KEY
from orbit_sglang.startup.checkpoint_check import check_checkpoint
from orbit_sglang.upstream import hooks


def around_launch(original: Callable, cls: type, server_args: Any, *args: Any, **kwargs: Any) -> tuple:
    """Checks the hooks and the checkpoint of a server with slots; runs around ``Engine._launch_subprocesses``.

    Raises:
        NotInPlaceError: a hook is not applied here or in a scheduler process.
        ValueError: the checkpoint would be served wrongly.
    """
    if not server_args.enable_orbit_slots:
        return original(cls, server_args, *args, **kwargs)
    hooks.require_applied()
    check_checkpoint(server_args.model_path, server_args.device)
    launched = original(cls, server_args, *args, **kwargs)
    infos = launched[3].scheduler_infos
    if missing := [rank for rank, info in enumerate(infos) if INIT_INFO_KEY not in info]:
        raise NotInPlaceError(
            f"scheduler processes {missing} run without Orbit's hooks: is the plugin 'orbit' left out of SGLANG_PLUGINS?"
        )
    return launched


def before_launch_server(server_args: Any, *args: Any, **kwargs: Any) -> None:
    """Finds out that the port is taken before the model is loaded; runs before ``http_server.launch_server``.

    Raises:
        OSError: the address cannot be listened on.
    """
    if not server_args.enable_orbit_slots:
        return
    family, kind, protocol, _, address = socket.getaddrinfo(
        server_args.host, server_args.port, type=socket.SOCK_STREAM
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise OSError(
                f"--host {server_args.host} --port {server_args.port}: {error.strerror}; choose another --port"
            ) from None
