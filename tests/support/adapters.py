"""Random adapters that fit the tiny models."""

import pathlib
import re
from collections.abc import Mapping

import torch

from orbit_kernels.adapters import AdapterMethod, OFTMethod
from orbit_kernels.adapters.config import LINEAR_TARGETS, AdapterConfig, tensor_name
from orbit_kernels.checkpoint.files import HFCheckpoint
from orbit_kernels.contract.payload import Adapter
from tests.support.tiny_models import RAGGED_SIZES, SIZES

LINEAR_WEIGHT = re.compile(r"(?P<module>(language_model\.)?model\.layers\.\d+\..*_proj(_with_mqa)?)\.weight")
EXPERT = re.compile(r"\.experts\.\d+\.")
ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


def dense_linears(sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Rows and columns of every linear of a dense model by name."""
    hidden, intermediate = sizes["hidden_size"], sizes["intermediate_size"]
    rows = {"k_proj": hidden // 2, "v_proj": hidden // 2, "gate_proj": intermediate, "up_proj": intermediate}
    return {
        f"model.layers.{layer}.{'self_attn' if target in ATTENTION_TARGETS else 'mlp'}.{target}": (
            rows.get(target, hidden),
            intermediate if target == "down_proj" else hidden,
        )
        for layer in range(sizes["num_hidden_layers"])
        for target in LINEAR_TARGETS
    }


def linears_of(folder: pathlib.Path) -> dict[str, tuple[int, int]]:
    """Rows and columns of every linear of an unquantised checkpoint, experts among them, by name."""
    matches = {LINEAR_WEIGHT.fullmatch(name): spec for name, spec in HFCheckpoint(folder).specs.items()}
    return {match["module"]: tuple(spec.shape) for match, spec in matches.items() if match}


LINEARS = dense_linears(SIZES)
RAGGED_LINEARS = dense_linears(RAGGED_SIZES)


def random_adapter(
    seed: int,
    linears: Mapping[str, tuple[int, int]] = LINEARS,
    *,
    method: AdapterMethod | None = None,
    targets: tuple[str, ...] | None = None,
    without: tuple[str, ...] = (),
    tied: bool = True,
    common_experts: bool = False,
    scale: float = 0.05,
    dtype: torch.dtype = torch.float32,
) -> Adapter:
    """An adapter, by default OFT, far enough from the identity to change tokens.

    The parts of a fused projection share what acts on the input in a tied one, and all experts of a layer all of it where
    they are shared.

    Args:
        linears: rows and columns of the linears by name.
        targets: leaf names of those that carry it, None for all; not those in ``without``.
    """
    generator = torch.Generator().manual_seed(seed)
    method = method or OFTMethod(block_size=32)
    tensors: dict[str, torch.Tensor] = {}
    names = [EXPERT.sub(".experts.", module) if common_experts else module for module in linears]
    leaves = {name.rpartition(".")[2] for name in names}
    carried = sorted(leaves - set(without) if targets is None else leaves & set(targets) - set(without))
    config = AdapterConfig(method=method, target_modules=tuple(carried))
    for name, shape in zip(names, linears.values(), strict=True):
        if not config.targets(name):
            continue
        for leaf, size in method.shapes(*shape).items():
            tensor = (scale * torch.randn(size, generator=generator)).to(dtype)
            own = tensor_name(name, leaf)
            tensors.setdefault(config.tied_names(own)[0] if tied else own, tensor)
    return Adapter(tensors, config, tied)
