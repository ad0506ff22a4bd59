"""Two OFT slots beside the frozen linears of a running model.

The linears, their weights and their quantisation stay SGLang's. Only ``layer.quant_method.apply`` is wrapped, per
instance, so that the input is rotated first: ``y = (x R) W^T``.

Dimension suffixes: T tokens of a batch, D input width, O output width, N blocks, B block size, P rotations of a linear
(one, or one per part of a fused projection in split mode).
"""

import collections
import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence

import torch
from sglang.srt.layers.linear import LinearBase

from orbit_kernels import oft, wire
from orbit_kernels.adapter import tensor_name
from orbit_kernels.wire import Adapter, AdapterError
from orbit_sglang.config import SlotsConfig
from orbit_sglang.versions import BASE_SLOT, SLOTS

logger = logging.getLogger(__name__)

FUSED_PARTS = dict(zip(("qkv_proj", "gate_up_proj"), wire.FUSED_PARTS, strict=True))
PLAIN_LINEARS = ("o_proj", "down_proj")


class BatchSlots:
    """The slot of every token in the forward pass that is running.

    ``uniform`` is the one slot of the whole batch, known on the host; None while tokens may differ, and outside a
    forward pass. ``slot_of_token_T`` holds the same per token at a fixed address, so that a captured CUDA graph
    replays with the slots of the day; outside a pass it is the base slot for all.

    Args:
        capacity_tokens: most tokens of one forward pass.
        device: where the model runs.
    """

    def __init__(self, capacity_tokens: int, device: torch.device):
        self.uniform: int | None = None
        self.slot_of_token_T = torch.full((capacity_tokens,), BASE_SLOT, dtype=torch.int32, device=device)

    @contextlib.contextmanager
    def running(self, slots: Sequence[int], tokens_per_request: Sequence[int] | None) -> Iterator[None]:
        """Describe a batch for the length of its forward pass.

        Args:
            slots: slot of each request.
            tokens_per_request: tokens that each contributes, None for one each.
        """
        per_request = torch.tensor(slots, dtype=torch.int32)
        if tokens_per_request is not None:
            per_request = per_request.repeat_interleave(torch.tensor(tokens_per_request))
        num_tokens = per_request.numel()
        self.slot_of_token_T[:num_tokens].copy_(per_request)
        self.uniform = slots[0] if len(set(slots)) == 1 else None
        try:
            yield
        finally:
            self.uniform = None
            self.slot_of_token_T[:num_tokens].fill_(BASE_SLOT)


class SlottedLinear:
    """A frozen linear with a rotation per slot, or per slot and part.

    Args:
        parts: Hugging Face names of the parts, one for a linear that is not fused.
        layer: SGLang's linear; its ``quant_method.apply`` is replaced on this instance.
        num_rotations: 1, or ``len(parts)`` for separate rotations.
        block_size: B; divides the input width.
        dtype: dtype of the activations, in which the rotations are kept.
        batch: slots of the running forward pass.
    """

    def __init__(
        self,
        parts: tuple[str, ...],
        layer: LinearBase,
        num_rotations: int,
        block_size: int,
        dtype: torch.dtype,
        batch: BatchSlots,
    ):
        num_blocks = oft.num_blocks(layer.input_size, block_size, parts[0])
        device = batch.slot_of_token_T.device
        self.parts = parts
        self._batch = batch
        self._part_sizes = list(layer.output_partition_sizes) if num_rotations > 1 else []
        self._identity_BB = torch.eye(block_size, dtype=dtype, device=device)
        self._blocks_PNBB = {
            slot: self._identity_BB.repeat(num_rotations, num_blocks, 1, 1).contiguous() for slot in SLOTS
        }
        self._rotated = dict.fromkeys((BASE_SLOT, *SLOTS), False)
        self._base_apply = layer.quant_method.apply
        layer.quant_method.apply = self.apply

    @property
    def num_rotations(self) -> int:
        """P."""
        return self._blocks_PNBB[SLOTS[0]].shape[0]

    def write(self, slot: int, rotations: Sequence[torch.Tensor | None]) -> None:
        """Fill a slot that no request uses: blocks [N, B, B] per rotation, None for the identity."""
        for index, rotation_NBB in enumerate(rotations):
            target_NBB = self._blocks_PNBB[slot][index]
            target_NBB.copy_(self._identity_BB.expand_as(target_NBB) if rotation_NBB is None else rotation_NBB)
        self._rotated[slot] = any(rotation is not None for rotation in rotations)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``quant_method.apply`` with the input rotated: x [..., D] to [..., O], same dtype."""
        slot = self._batch.uniform
        if slot is not None and not self._rotated[slot]:
            return self._base_apply(layer, x, bias)
        x_TD = x.reshape(-1, x.shape[-1])
        rotated = [self._rotate(x_TD, index, slot) for index in range(self.num_rotations)]
        if len(rotated) == 1:
            return self._base_apply(layer, rotated[0].view(x.shape), bias)
        y_PTO = self._base_apply(layer, torch.cat(rotated), bias).unflatten(0, (len(rotated), x_TD.shape[0]))
        parts = [y_PTO[index].split(self._part_sizes, dim=-1)[index] for index in range(len(rotated))]
        return torch.cat(parts, dim=-1).unflatten(0, x.shape[:-1])

    def _rotate(self, x_TD: torch.Tensor, index: int, uniform: int | None) -> torch.Tensor:
        if uniform is not None:
            return oft.rotate(x_TD, self._blocks_PNBB[uniform][index])
        slot_T1 = self._batch.slot_of_token_T[: x_TD.shape[0], None]
        rotated_TD = x_TD
        for slot in SLOTS:
            rotated_TD = torch.where(slot_T1 == slot, oft.rotate(x_TD, self._blocks_PNBB[slot][index]), rotated_TD)
        return rotated_TD


class PreparedAdapter:
    """An accepted adapter, with its rotations computed in fp32 and not yet in a slot."""

    def __init__(self, adapter: Adapter, rotations: list[tuple[SlottedLinear, list[torch.Tensor | None]]]):
        self.adapter = adapter
        self._rotations = rotations

    def write(self, slot: int) -> None:
        """Place it in a slot that no request uses."""
        for linear, rotations in self._rotations:
            linear.write(slot, rotations)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the pass that uses the slot next runs on another stream

    def module_counts(self) -> dict[str, int]:
        """Adapted linears by Hugging Face leaf name."""
        leaves = (name.rsplit(".", 3)[1] for name in self.adapter.tensors)
        return dict(sorted(collections.Counter(leaves).items()))


class SlotBank:
    """Every linear of one model that can carry an adapter.

    Args:
        model: SGLang's model, loaded.
        config: options of the slots.
        dtype: dtype of the activations.
        batch: slots of the running forward pass.

    Raises:
        ValueError: the model has no linear that the slots know.
    """

    def __init__(self, model: torch.nn.Module, config: SlotsConfig, dtype: torch.dtype, batch: BatchSlots):
        self.batch = batch
        self.widths: dict[str, int] = {}
        self._config = config
        self._linears: list[SlottedLinear] = []
        for name, layer in model.named_modules():
            parts = _part_names(name)
            if parts and isinstance(layer, LinearBase):
                self._add(parts, layer, dtype)
        if not self._linears:
            known = [*FUSED_PARTS, *PLAIN_LINEARS]
            raise ValueError(
                f"{type(model).__name__} has no linear named {', '.join(known)} whose width the block size "
                f"{config.block_size} divides; serve a Qwen3 or Llama model, or change --orbit-block-size"
            )
        logger.info("Adapter slots on %d linears, fused projections %s", len(self._linears), config.fused)

    def prepare(self, payload: bytes) -> PreparedAdapter:
        """Read and check a payload, and compute its rotations; touches no slot.

        Raises:
            AdapterError: the payload does not fit this model or these slots; all problems listed.
        """
        adapter = Adapter.decode(payload)
        if adapter.config.block_size != self._config.block_size:
            raise AdapterError(
                [
                    f"block size {adapter.config.block_size}: the slots hold blocks of {self._config.block_size}; "
                    "train with that size or start the server with another --orbit-block-size"
                ]
            )
        adapter.check(self.widths)
        if problems := [problem for linear in self._linears for problem in _tie_problems(linear, adapter)]:
            raise AdapterError(problems)
        return PreparedAdapter(adapter, [(linear, _rotations(linear, adapter)) for linear in self._linears])

    def _add(self, parts: tuple[str, ...], layer: LinearBase, dtype: torch.dtype) -> None:
        self.widths.update(dict.fromkeys(parts, layer.input_size))
        block_size = self._config.block_size
        if layer.input_size % block_size:
            logger.warning("%s: block size %d does not divide width %d: no slot", parts, block_size, layer.input_size)
            return
        num_rotations = len(parts) if self._config.fused == "split" else 1
        self._linears.append(SlottedLinear(parts, layer, num_rotations, block_size, dtype, self.batch))


def _part_names(module: str) -> tuple[str, ...]:
    """Hugging Face names of the linears behind one of SGLang's; empty when the slots do not know it."""
    leaf = module.rsplit(".", 1)[-1]
    if leaf in PLAIN_LINEARS:
        return (module,)
    return tuple(module.removesuffix(leaf) + part for part in FUSED_PARTS.get(leaf, ()))


def _part_entries(linear: SlottedLinear, adapter: Adapter) -> Mapping[str, torch.Tensor | None]:
    return {part: adapter.tensors.get(tensor_name(part)) for part in linear.parts}


def _tie_problems(linear: SlottedLinear, adapter: Adapter) -> list[str]:
    """Parts that differ although the linear has one rotation for all of them."""
    if linear.num_rotations == len(linear.parts):
        return []
    (first, reference), *others = _part_entries(linear, adapter).items()
    differing = [part for part, entries in others if not _same(reference, entries)]
    if not differing:
        return []
    return [
        f"{', '.join(differing)}: differs from {first}, and the server ties the parts of a fused projection; "
        "train with tied rotations or start the server with --orbit-fused split"
    ]


def _same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return left.dtype == right.dtype and torch.equal(left, right)


def _rotations(linear: SlottedLinear, adapter: Adapter) -> list[torch.Tensor | None]:
    config = adapter.config
    entries = list(_part_entries(linear, adapter).values())[: linear.num_rotations]
    return [
        None if part is None else oft.rotation(part, config.block_size, config.cayley_neumann_terms) for part in entries
    ]
