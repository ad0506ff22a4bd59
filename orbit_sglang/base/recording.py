"""This module records the base as it is stored, between SGLang's loading and its repacking."""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.server_args import get_global_server_args

from orbit_kernels.checkpoint.manifest import BaseManifest
from orbit_kernels.formats import BaseScheme
from orbit_kernels.frozen.product import StoredWeight
from orbit_kernels.linears.names import ROUTER
from orbit_kernels.upstream.ledger import Method
from orbit_sglang.base import stored
from orbit_sglang.base.streamed import StreamedExperts, has_own_kernels
from orbit_sglang.model.ranks import ServerRanks
from orbit_sglang.startup.enabled import slots_enabled
from orbit_sglang.startup.scheme import language_config, read_config, read_scheme
from orbit_sglang.upstream.hooks import method_replaced

logger = logging.getLogger(__name__)

LOAD_WEIGHTS = Method("sglang.srt.models.qwen3.Qwen3ForCausalLM.load_weights", ("self", "weights"))
"""This method stands for that of any of SGLang's models."""


def around_load(
    original: Callable, model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]], target_device: torch.device
) -> None:
    """Records the base; runs around ``DefaultModelLoader.load_weights_and_postprocess``.

    That loads and then repacks.
    """
    if not slots_enabled():
        original(model, weights, target_device)
        return
    server_args = get_global_server_args()
    load = model.load_weights

    def load_and_record(weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        scheme = read_scheme(server_args.model_path)
        if not hasattr(model, "orbit_base"):
            stored.invalidate_scales(model, scheme)
        passing = _streamed_experts(model, scheme, server_args.model_path)
        result = load(weights if passing is None else passing.watch(weights))
        linears = stored.stored_linears(model, scheme) | stored.stored_experts(model)
        stored.check_values(linears)
        model.orbit_base = _record(model, linears, passing)
        return result

    # SGLang repacks in the same call, so there is no later place.
    with method_replaced(LOAD_WEIGHTS, model, load_and_record):
        original(model, weights, target_device)


def _streamed_experts(model: torch.nn.Module, scheme: BaseScheme, model_path: str) -> StreamedExperts | None:
    """Returns what records experts on their way to SGLang's own kernels.

    It is None where the reference holds them, or where there are none.
    """
    config = language_config(read_config(model_path))
    if not has_own_kernels(model) or "moe_intermediate_size" not in config:  # of a family that is not compared
        return None
    ranks = get_tp_group()
    (dtype,) = {module.weight.dtype for module in model.modules() if isinstance(module, VocabParallelEmbedding)}
    return StreamedExperts(scheme, config, dtype, rank=ranks.rank_in_group, num_ranks=ranks.world_size)


def _record(
    model: torch.nn.Module, linears: Mapping[str, Mapping[str, StoredWeight]], passed: StreamedExperts | None
) -> dict[str, Any]:
    """Returns the manifest of the base on all ranks, as JSON values."""
    start = time.perf_counter()
    stored_as = {part: weight.format for parts in linears.values() for part, weight in parts.items()}
    # Routers are never quantised; SGLang has them as linears in one family and not in another.
    formats = {part: weight_format for part, weight_format in stored_as.items() if not part.endswith(ROUTER)}
    manifest = BaseManifest.of(formats, stored.checkpoint_tensors(model, linears))
    if passed is not None:
        manifest = BaseManifest.union([manifest, passed.manifest])
    manifest = BaseManifest.union(ServerRanks(get_tp_group()).gather(manifest))
    logger.info("Digests of %d base tensors took %.1f s", len(manifest.tensors), time.perf_counter() - start)
    return dataclasses.asdict(manifest)
