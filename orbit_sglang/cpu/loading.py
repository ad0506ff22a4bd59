"""This module puts the reference behind the quantised linears, between SGLang's loading and its repacking."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.server_args import get_global_server_args

from orbit_kernels.frozen.product import StoredWeight
from orbit_sglang.base import stored
from orbit_sglang.base.recording import LOAD_WEIGHTS
from orbit_sglang.cpu import latent_attention, linear
from orbit_sglang.startup.enabled import slots_enabled
from orbit_sglang.startup.options import FrozenBaseConfig
from orbit_sglang.startup.scheme import read_scheme
from orbit_sglang.upstream.hooks import method_replaced

logger = logging.getLogger(__name__)


def around_load(
    original: Callable, model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]], target_device: torch.device
) -> None:
    """Attaches the reference; runs around ``DefaultModelLoader.load_weights_and_postprocess``.

    That loads and then repacks.
    """
    if not slots_enabled():
        original(model, weights, target_device)
        return
    server_args, load = get_global_server_args(), model.load_weights

    def load_and_attach(weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        result = load(weights)
        linears = stored.stored_linears(model, read_scheme(server_args.model_path))
        _attach_reference(model, linears, FrozenBaseConfig.from_server_args(server_args))
        latent_attention.absorb(model, linears)
        return result

    # SGLang repacks in the same call, so there is no later place.
    with method_replaced(LOAD_WEIGHTS, model, load_and_attach):
        original(model, weights, target_device)


def around_width_padding(original: Callable, config: Any, attribute: str, padding: int) -> Any:
    """Keeps the checkpoint's widths on a CPU; runs around ``update_intermediate_size``.

    SGLang 0.5.12 pads them to whole blocks for its AMX kernels
    (``configs/update_config.py::adjust_config_with_unaligned_cpu_tp``), so that it holds other tensors than the
    checkpoint has.
    """
    return config if slots_enabled() else original(config, attribute, padding)


def _attach_reference(
    model: torch.nn.Module, linears: Mapping[str, Mapping[str, StoredWeight]], config: FrozenBaseConfig
) -> None:
    """Lets every quantised linear compute with the reference."""
    layers = {name: model.get_submodule(name) for name in linears}
    quantized = [name for name, layer in layers.items() if isinstance(layer, LinearBase) and stored.is_quantized(layer)]
    for name in quantized:
        linear.attach(layers[name], list(linears[name].values()), config)
    if quantized:
        logger.info("%d quantised linears on the CPU reference, activations %s", len(quantized), config.activations)
