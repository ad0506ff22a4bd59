"""This module has ``orbit status``, ``stage``, ``activate``, ``rollback`` and ``discard``, which a running server carries out.

It imports neither verl nor SGLang, and torch only to read an adapter.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.markup import escape

from orbit_kernels.contract.answers import Staged
from orbit_kernels.contract.client import CallError, SlotClient
from orbit_kernels.contract.keys import DEFAULT_INFLIGHT, InflightMode

KEY_VARIABLE = "ORBIT_SERVER_KEY"
"""The server's key is read from this variable: one on a command line can be read by every user of the machine."""

Server = Annotated[str, typer.Option(help="URL of the server, e.g. http://127.0.0.1:30000.")]
Version = Annotated[int | None, typer.Option(help="Of the adapter; by default the one after the last that was staged.")]
Inflight = Annotated[InflightMode, typer.Option(help="Whether running requests finish on their version, or switch.")]
URL = "http://127.0.0.1:30000"


def status(server: Server = URL) -> None:
    """Print what the slots of a server hold, as JSON."""
    _print(lambda: _client(server).status())


def stage(
    folder: Annotated[Path, typer.Argument(help="Adapter as peft saves it.")],
    server: Server = URL,
    version: Version = None,
) -> None:
    """Put an adapter into the inactive slot of a server, and print what was staged, as JSON.

    Exit status 1, and nothing changed, when the folder or the server refuses it.
    """
    # Importing torch costs seconds, which ``--help`` does without.
    from orbit_kernels.contract.peft_folder import read_peft_folder

    def operation() -> Staged:
        payload, slots = read_peft_folder(folder).encode(), _client(server)
        return slots.stage(slots.status().highest_seen + 1 if version is None else version, payload)

    _print(operation)


def activate(
    version: Annotated[int, typer.Argument(help="A staged version.")],
    server: Server = URL,
    inflight: Inflight = DEFAULT_INFLIGHT,
) -> None:
    """Make a staged version the one that new requests get."""
    _print(lambda: _client(server).activate(version, inflight))


def rollback(
    version: Annotated[int | None, typer.Argument(help="A version; by default the one that was active before.")] = None,
    server: Server = URL,
    inflight: Inflight = DEFAULT_INFLIGHT,
) -> None:
    """Go back to an older version, or to 0, the base."""
    _print(lambda: _client(server).rollback(version, inflight))


def discard(server: Server = URL) -> None:
    """Empty the inactive slots."""
    _print(lambda: _client(server).discard())


def _client(server: str) -> SlotClient:
    return SlotClient(server, os.environ.get(KEY_VARIABLE))


def _print(operation: Callable[[], BaseModel]) -> None:
    try:
        print(operation().model_dump_json(indent=2))
    except (CallError, OSError, ValueError) as error:
        Console(stderr=True, highlight=False).print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from None
