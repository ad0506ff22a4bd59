"""Between SGLang's loading and its repacking: record the base as it is stored, and attach the reference on a CPU."""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.server_args import get_global_server_args
from sglang.srt.utils import is_cpu

from orbit_kernels.formats import BaseScheme
from orbit_kernels.frozen import StoredWeight
from orbit_kernels.manifest import BaseManifest
from orbit_kernels.names import ROUTER
from orbit_sglang import latent_attention
from orbit_sglang.config import FrozenBaseConfig
from orbit_sglang.quant import experts, linear, stored
from orbit_sglang.quant.scheme import language_config, read_config, read_scheme
from orbit_sglang.quant.streamed import StreamedExperts, has_own_kernels
from orbit_sglang.ranks import Ranks

logger = logging.getLogger(__name__)


def around_width_padding(original: Callable, config: Any, attribute: str, padding: int) -> Any:
    """Around ``update_intermediate_size``: keep the checkpoint's widths on a CPU.

    SGLang 0.5.12 pads them to whole blocks for its AMX kernels (``configs/update_config.py:110``), so that it holds other
    tensors than the checkpoint has.
    """
    return config if linear.slots_enabled() else original(config, attribute, padding)


def around_load(
    original: Callable, model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]], target_device: torch.device
) -> None:
    """Around ``DefaultModelLoader.load_weights_and_postprocess``, which loads and then repacks."""
    if not linear.slots_enabled():
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
        linears = stored.stored_linears(model, scheme) | experts.stored_experts(model)
        stored.check_values(linears)
        model.orbit_base = _record(model, linears, passing)
        if is_cpu():
            _attach_reference(model, linears, FrozenBaseConfig.from_server_args(server_args))
            latent_attention.absorb(model, linears)
        return result

    model.load_weights = load_and_record  # SGLang repacks in the same call, so there is no later place
    try:
        original(model, weights, target_device)
    finally:
        del model.load_weights


def _streamed_experts(model: torch.nn.Module, scheme: BaseScheme, model_path: str) -> StreamedExperts | None:
    """What records experts on their way to SGLang's own kernels; None where the reference holds them, or there are none."""
    config = language_config(read_config(model_path))
    if not has_own_kernels(model) or "moe_intermediate_size" not in config:  # of a family that is not compared
        return None
    ranks = get_tp_group()
    (dtype,) = {module.weight.dtype for module in model.modules() if isinstance(module, VocabParallelEmbedding)}
    return StreamedExperts(scheme, config, dtype, rank=ranks.rank_in_group, num_ranks=ranks.world_size)


def _record(
    model: torch.nn.Module, linears: Mapping[str, Mapping[str, StoredWeight]], passed: StreamedExperts | None
) -> dict[str, Any]:
    """The manifest of the base on all ranks, as JSON values."""
    start = time.perf_counter()
    stored_as = {part: weight.format for parts in linears.values() for part, weight in parts.items()}
    # Routers are never quantised; SGLang has them as linears in one family and not in another.
    formats = {part: weight_format for part, weight_format in stored_as.items() if not part.endswith(ROUTER)}
    manifest = BaseManifest.of(formats, stored.checkpoint_tensors(model, linears))
    if passed is not None:
        manifest = BaseManifest.union([manifest, passed.manifest])
    manifest = BaseManifest.union(Ranks(get_tp_group()).gather(manifest))
    logger.info("Digests of %d base tensors took %.1f s", len(manifest.tensors), time.perf_counter() - start)
    return dataclasses.asdict(manifest)


def _attach_reference(
    model: torch.nn.Module, linears: Mapping[str, Mapping[str, StoredWeight]], config: FrozenBaseConfig
) -> None:
    """Let every quantised linear compute with the reference."""
    layers = {name: model.get_submodule(name) for name in linears}
    quantized = [name for name, layer in layers.items() if isinstance(layer, LinearBase) and stored.is_quantized(layer)]
    for name in quantized:
        linear.attach(layers[name], list(linears[name].values()), config)
    if quantized:
        logger.info("%d quantised linears on the CPU reference, activations %s", len(quantized), config.activations)
