"""This module holds a run's targets against a model, and against what its servers have slots for."""

from collections.abc import Iterable

from orbit_kernels.adapters.config import AdapterConfig
from orbit_kernels.families import DecoderArchitecture
from orbit_kernels.linears.fusing import GATE_UP
from orbit_kernels.linears.names import EXPERTS, without_expert
from orbit_verl.config.keys import AdapterSettings
from orbit_verl.model.tensors import fused_linears, linear_shape


def adapted_shapes(architecture: DecoderArchitecture, settings: AdapterSettings) -> dict[str, tuple[int, int]]:
    """Returns rows and columns of everything that can carry an adapter, by name.

    The name of what a layer's experts share has no number.
    """
    named = without_expert if settings.experts == "common" else str
    return {
        named(f"{prefix}.{part}"): linear_shape(architecture, f"{prefix}.{part}")
        for prefix, parts in fused_linears(architecture)
        for part in parts
    }


def check_targets(architecture: DecoderArchitecture, settings: AdapterSettings) -> None:
    """Holds the targets against the linears of a model.

    Raises:
        ValueError: a target matches no linear, or only some experts of a layer; the method cannot adapt a linear; or a
            rotation would be shared by only some parts of a fused projection.
    """
    adapter, shapes = settings.to_adapter_config(), adapted_shapes(architecture, settings)
    try:
        adapter.check_targets(shapes)
        for module in filter(adapter.targets, shapes):
            adapter.method.shapes(*shapes[module], module)
        _check_experts(adapter, shapes)
        if settings.fused == "tied" and adapter.method.acts_on_input:
            _check_tied(architecture, adapter)
    except ValueError as error:
        raise ValueError(f"orbit.adapter: {error}") from None


def check_served(adapter: AdapterConfig, modules: Iterable[str], device: str) -> None:
    """Holds the targets against what a server on a device has slots for.

    Args:
        adapter: the run's.
        modules: everything in the model that could carry an adapter, by name.
        device: ``cpu`` computes routed experts with slots on each; elsewhere SGLang's own kernels do.

    Raises:
        ValueError: a target has no slot.
    """
    with_slots = tuple(f"{EXPERTS}{projection}" for projection in GATE_UP)  # of all experts, by names without a number
    targeted = filter(adapter.targets, modules)
    without = [module for module in targeted if EXPERTS in module and not module.endswith(with_slots)]
    if device != "cpu" and without:
        raise ValueError(
            f"orbit.adapter.target_modules={list(adapter.target_modules)} match {without[0]}: SGLang's own kernels compute routed "
            "experts on this device, with one rotation of all experts in front of gate and up. Set orbit.adapter.experts=common "
            "and target experts.gate_proj and experts.up_proj, or none; name the others by more than their last part, e.g. "
            "mlp.down_proj or shared_experts.down_proj"
        )


def _check_experts(adapter: AdapterConfig, modules: Iterable[str]) -> None:
    targeted: dict[str, bool] = {}
    for module in modules:
        if targeted.setdefault(without_expert(module), adapter.targets(module)) != adapter.targets(module):
            raise ValueError(
                f"target_modules {list(adapter.target_modules)} match only some experts of {without_expert(module)}: experts of "
                "a layer carry the same adapters; target all of them or none"
            )


def _check_tied(architecture: DecoderArchitecture, adapter: AdapterConfig) -> None:
    for prefix, parts in fused_linears(architecture):
        targets = [part for part in parts if adapter.targets(f"{prefix}.{part}")]
        if 0 < len(targets) < len(parts):
            raise ValueError(
                f"fused='tied' with only {targets} of {list(parts)} in target_modules: one rotation covers all parts of a fused "
                "projection; target all of them or none, or set fused='split'"
            )
