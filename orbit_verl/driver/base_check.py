"""Before the first step: trainer and servers hold the same base, tensor by tensor."""

import logging
from collections.abc import Mapping, Sequence

import httpx

from orbit_kernels.checkpoint.manifest import BaseManifest, first_difference

logger = logging.getLogger(__name__)

ROUTE = "/orbit/base"


class PreflightError(RuntimeError):
    """Trainer and server would not compute the same policy; names the first thing that differs and both values."""


def check_bases(ranks: Sequence[BaseManifest], served: Mapping[str, BaseManifest]) -> None:
    """Compare the base of every trainer rank and of every server with that of the first rank.

    Args:
        ranks: what each rank of the trainer holds, together with the others of its expert group, digested in the parts in
            which the servers hold it.
        served: what each SGLang server says that it holds, by ``host:port``.

    Raises:
        PreflightError: a base differs.
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
    """What a server says about its base.

    Raises:
        PreflightError: it does not answer in time, or not with a manifest.
    """
    try:
        response = httpx.get(f"http://{server}{ROUTE}", timeout=timeout_s, trust_env=False)
    except httpx.TransportError as error:
        raise PreflightError(
            f"the SGLang server at {server} does not answer {ROUTE} ({type(error).__name__}); see its log above"
        ) from error
    if not response.is_success:
        raise PreflightError(
            f"the SGLang server at {server} answers {ROUTE} with {response.status_code}: {response.text[:500]}"
        )
    try:
        return BaseManifest.from_json(response.text)
    except ValueError as error:
        raise PreflightError(f"the SGLang server at {server} answers {ROUTE} without a manifest: {error}") from error


def require_equal(trainer: BaseManifest, other: BaseManifest, holder: str) -> None:
    """Hold another process's base against that of the trainer's first rank.

    Raises:
        PreflightError: they differ.
    """
    difference = first_difference(trainer, other, ("the trainer", holder))
    if difference is not None:
        raise PreflightError(
            f"{holder} holds another base than the trainer: {difference}. Point both at the same checkpoint folder"
        )
