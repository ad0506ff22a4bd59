"""This module proves before the first step that trainer and servers hold the same base, tensor by tensor."""

import logging
from collections.abc import Mapping, Sequence

from orbit_kernels.checkpoint.manifest import BaseManifest, first_difference
from orbit_kernels.contract import routes
from orbit_kernels.contract.client import CallError, SlotClient

logger = logging.getLogger(__name__)


class BaseMismatch(RuntimeError):
    """A `BaseMismatch` says that trainer and server would not compute the same policy.

    It names the first thing that differs and both values.
    """


def check_bases(ranks: Sequence[BaseManifest], served: Mapping[str, BaseManifest]) -> None:
    """Compares the base of every trainer rank and of every server with that of the first rank.

    Args:
        ranks: what each rank of the trainer holds, together with the others of its expert group, digested in the parts
            in which the servers hold it.
        served: what each SGLang server says that it holds, by ``host:port``.

    Raises:
        BaseMismatch: a base differs.
    """
    trainer, *others = ranks
    for rank, manifest in enumerate(others, start=1):
        require_equal(trainer, manifest, f"trainer rank {rank}")
    for server, manifest in served.items():
        require_equal(trainer, manifest, f"the SGLang server at {server}")
    logger.info(
        "orbit: %d tensors of the base are equal, trainer ranks: %d, servers: %d",
        len(trainer.tensors),
        len(ranks),
        len(served),
    )


def served_manifest(server: str, timeout_s: float) -> BaseManifest:
    """Returns what a server says about its base.

    Raises:
        BaseMismatch: it does not answer in time, or not with a manifest.
    """
    try:
        base = SlotClient(f"http://{server}", timeout_s=timeout_s).base()
    except CallError as error:
        if error.status is None:
            raise BaseMismatch(
                f"the SGLang server at {server} does not answer {routes.BASE.path} ({error.message}); see its log above"
            ) from error
        raise BaseMismatch(f"the SGLang server at {server} answers {routes.BASE.path} with {error}") from error
    return BaseManifest(formats=base.formats, tensors=base.tensors)


def require_equal(trainer: BaseManifest, other: BaseManifest, holder: str) -> None:
    """Holds another process's base against that of the trainer's first rank.

    Raises:
        BaseMismatch: they differ.
    """
    difference = first_difference(trainer, other, ("the trainer", holder))
    if difference is not None:
        raise BaseMismatch(
            f"{holder} holds another base than the trainer: {difference}. Point both at the same checkpoint folder"
        )
