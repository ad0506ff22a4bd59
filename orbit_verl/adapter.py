"""The trained part of the policy: OFT rotations on the inputs of the frozen linears."""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import nn

from orbit_kernels import oft
from orbit_kernels.adapter import AdapterConfig, tensor_name
from orbit_kernels.wire import Adapter
from orbit_verl.config import AdapterSettings
from orbit_verl.model.linear import FrozenLinear

logger = logging.getLogger(__name__)

PEFT_CONFIG_FILE = "adapter_config.json"
PEFT_WEIGHTS_FILE = "adapter_model.safetensors"

ORTHOGONALITY_LIMIT = 0.05
"""Orthogonality error past which a warning is logged; the five-term series reaches it at a block norm of about 0.37."""

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class OFTRotation(nn.Module):
    """A trained block-diagonal rotation of [..., D] activations, the identity at the start.

    Args:
        width: D.
        config: block size and Cayley series.
        dtype: of the trained entries [D / B, B * (B - 1) / 2].
        device: of the entries.
    """

    def __init__(self, width: int, config: AdapterConfig, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self._block_size, self._terms = config.block_size, config.cayley_neumann_terms
        shape = (oft.num_blocks(width, config.block_size), oft.num_entries(config.block_size))
        self.entries = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))

    def blocks(self) -> torch.Tensor:
        """The rotation's blocks [D / B, B, B] in fp32."""
        return oft.rotation(self.entries, self._block_size, self._terms)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rotated activations; shape and dtype of ``x``."""
        return oft.rotate(x, self.blocks())


class TrainerAdapter:
    """The adapter over the frozen linears of a model.

    Args:
        linears: each with the Hugging Face name of the module that holds its parts (``model.frozen_linears``).
        settings: kind, sizes, targets and precision.

    Raises:
        ValueError: the targets match no linear, the block size does not divide an input width, or ``fused="tied"``
            is asked for a fused projection of which only some parts are targeted.
    """

    def __init__(self, linears: Sequence[tuple[str, FrozenLinear]], settings: AdapterSettings):
        self.config = settings.to_adapter_config()
        self.dtype = _DTYPES[settings.dtype]
        self._linears = list(linears)
        self._widths = {f"{prefix}.{part}": linear.input_size for prefix, linear in linears for part in linear.parts}
        self._by_module: dict[str, OFTRotation] = {}
        self._check_targets()
        for prefix, linear in self._linears:
            self._attach(prefix, linear, tied=settings.fused == "tied")

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The trained tensors by peft's name; a rotation that several parts share goes by its first part's name."""
        first: dict[int, str] = {}
        for module, rotation in self._by_module.items():
            first.setdefault(id(rotation), module)
        return {tensor_name(module): self._by_module[module].entries for module in first.values()}

    @property
    def num_bytes(self) -> int:
        """Size of the trained tensors. An export is larger when parts share a rotation, as peft has no shared tensors."""
        return sum(parameter.nbytes for parameter in self.named_parameters().values())

    def export(self) -> Adapter:
        """A copy under peft's names, one tensor for each part; later training does not change it."""
        tensors = {tensor_name(m): r.entries.detach().clone() for m, r in self._by_module.items()}
        return Adapter(tensors, self.config)

    @torch.no_grad()
    def load(self, adapter: Adapter) -> None:
        """Replace the trained tensors.

        Raises:
            ValueError: another configuration or dtype, parts that share a rotation differ, or ``Adapter.check`` refuses.
        """
        if adapter.config != self.config:
            raise ValueError(
                f"adapter configuration {_comparable(adapter.config)} differs from the run's {_comparable(self.config)}; "
                "set orbit.adapter.* to the adapter's values"
            )
        adapter.check(self._widths)
        self._check_values(adapter)
        for module, rotation in self._by_module.items():
            rotation.entries.copy_(adapter.tensors[tensor_name(module)])

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Run the body on the frozen base, bit for bit; the adapter is back afterwards even when the body raises."""
        before = [linear.adapter_enabled for _, linear in self._linears]
        for _, linear in self._linears:
            linear.adapter_enabled = False
        try:
            yield
        finally:
            for (_, linear), enabled in zip(self._linears, before, strict=True):
                linear.adapter_enabled = enabled

    @contextlib.contextmanager
    def replaced_by(self, other: Adapter) -> Iterator[None]:
        """Run the body with another adapter's tensors; the own ones are back afterwards even when the body raises."""
        own = self.snapshot()
        self.load(other)
        try:
            yield
        finally:
            self.restore(own)

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Clones of the trained tensors by ``named_parameters``' names; on a CPU too, where ``.cpu()`` would alias."""
        return {name: parameter.detach().clone() for name, parameter in self.named_parameters().items()}

    @torch.no_grad()
    def restore(self, snapshot: Mapping[str, torch.Tensor]) -> None:
        """Put the tensors of ``snapshot`` back.

        Raises:
            ValueError: the snapshot is of another adapter.
        """
        parameters = self.named_parameters()
        if snapshot.keys() != parameters.keys():
            raise ValueError(
                f"snapshot of {len(snapshot)} tensors: must be one that snapshot() of this adapter returned"
            )
        for name, parameter in parameters.items():
            parameter.copy_(snapshot[name])

    @torch.no_grad()
    def orthogonality_error_max(self) -> float:
        """Largest Frobenius norm of ``R^T R - I`` over all blocks, dimensionless; logs a warning past the limit."""
        rotations = {id(rotation): rotation for rotation in self._by_module.values()}.values()
        error = max(oft.orthogonality_error(rotation.blocks()).max().item() for rotation in rotations)
        if error > ORTHOGONALITY_LIMIT:
            logger.warning(
                "orthogonality error %.3g is above %.3g: the Cayley-Neumann series no longer rotates; lower the learning "
                "rate or set orbit.adapter.cayley_neumann_terms=null",
                error,
                ORTHOGONALITY_LIMIT,
            )
        return error

    def _check_targets(self) -> None:
        leaves = {module.rsplit(".", 1)[-1] for module in self._widths}
        unknown = sorted(set(self.config.target_modules) - leaves)
        if unknown:
            raise ValueError(f"target_modules {unknown} match no linear of the model; known: {sorted(leaves)}")
        for module, width in self._widths.items():
            if self.config.targets(module):
                oft.num_blocks(width, self.config.block_size, module)

    def _attach(self, prefix: str, linear: FrozenLinear, tied: bool) -> None:
        targets = [part for part in linear.parts if self.config.targets(f"{prefix}.{part}")]
        if not targets:
            return
        if tied and len(targets) < len(linear.parts):
            raise ValueError(
                f"fused='tied' with only {targets} of {list(linear.parts)} in target_modules: one rotation covers all parts "
                "of a fused projection; target all of them or none, or set fused='split'"
            )
        if tied:
            shared = self._new_rotation(linear)
            linear.attach_shared(shared)
            rotations = dict.fromkeys(targets, shared)
        else:
            rotations = {part: self._new_rotation(linear) for part in targets}
            linear.attach_per_part(rotations)
        self._by_module |= {f"{prefix}.{part}": rotation for part, rotation in rotations.items()}

    def _new_rotation(self, linear: FrozenLinear) -> OFTRotation:
        return OFTRotation(linear.input_size, self.config, self.dtype, linear.weight.device)

    def _check_values(self, adapter: Adapter) -> None:
        first: dict[int, str] = {}
        for module, rotation in self._by_module.items():
            name = tensor_name(module)
            shared = first.setdefault(id(rotation), name)
            if not torch.equal(adapter.tensors[name], adapter.tensors[shared]):
                raise ValueError(f"{name} differs from {shared}: fused='tied' shares one rotation; set fused='split'")
            dtype = adapter.tensors[name].dtype
            if torch.promote_types(dtype, self.dtype) != self.dtype:
                raise ValueError(
                    f"{name} is {dtype}: a {self.dtype} adapter would round it; set orbit.adapter.dtype=fp32"
                )


def read_peft_folder(folder: str | Path) -> Adapter:
    """An adapter as peft saves it.

    Raises:
        ValueError: a file is missing or not a safetensors file, or the configuration is not one that the slots hold.
    """
    config, weights = Path(folder) / PEFT_CONFIG_FILE, Path(folder) / PEFT_WEIGHTS_FILE
    missing = [path.name for path in (config, weights) if not path.is_file()]
    if missing:
        raise ValueError(
            f"adapter folder {folder}: no {' and no '.join(missing)}; save one with peft's save_pretrained"
        )
    try:
        tensors = safetensors.torch.load_file(weights)
    except safetensors.SafetensorError as error:
        raise ValueError(f"adapter file {weights} is not a safetensors file: {error}") from None
    return Adapter(tensors, AdapterConfig.from_peft_json(config.read_text()))


def write_peft_folder(adapter: Adapter, folder: str | Path) -> None:
    """Write ``adapter`` as peft saves it; creates the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PEFT_CONFIG_FILE).write_text(adapter.config.to_peft_json())
    (folder / PEFT_WEIGHTS_FILE).write_bytes(adapter.to_peft_file())


def _comparable(config: AdapterConfig) -> str:
    return config.to_peft_json().replace("\n", "")
