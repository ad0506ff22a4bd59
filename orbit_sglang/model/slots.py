"""This module puts two adapter slots beside the frozen linears of a running model."""

import collections
import logging
from collections.abc import Sequence

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

from orbit_kernels.contract.payload import Adapter, AdapterError
from orbit_kernels.experts import GATE_UP, expert_module
from orbit_kernels.linears.share import Share
from orbit_sglang.model.naming import FUSED_PARTS, language_modules
from orbit_sglang.model.sharding import shares
from orbit_sglang.model.slotted import (
    LINEARS,
    AdaptedExpertsInput,
    AdaptedLatent,
    AdaptedLayer,
    BatchSlots,
    CommonExpertAdapter,
    SlottedExperts,
    SlottedLinear,
)
from orbit_sglang.model.stored_experts import StoredExperts
from orbit_sglang.startup.options import SlotsConfig

logger = logging.getLogger(__name__)

SLOTTED_LINEARS = (*FUSED_PARTS, "o_proj", "down_proj", "q_proj", "q_b_proj", "kv_a_proj_with_mqa")


class PreparedAdapter:
    """A ``PreparedAdapter`` is an accepted adapter, with what its slot is to hold computed and not yet written."""

    def __init__(self, adapter: Adapter, linears: Sequence[SlottedLinear]):
        self.adapter = adapter
        self._linears = linears
        self._prepared = type(linears[0]).prepare(linears, adapter)

    def write(self, slot: int) -> None:
        """Places it in a slot that no request uses."""
        # A stream of its own: the copies run beside the forward passes, which use the other slot.
        stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        with torch.cuda.stream(stream):
            SlottedLinear.write(slot, self._linears, self._prepared)
        if stream is not None:
            stream.synchronize()

    def module_counts(self) -> dict[str, int]:
        """Counts the adapted linears by Hugging Face leaf name."""
        leaves = (module.rsplit(".", 1)[-1] for module in self.adapter.modules())
        return dict(sorted(collections.Counter(leaves).items()))


class SlotBank:
    """A ``SlotBank`` holds every linear of one model that can carry an adapter.

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
        self._config = config
        self._shapes: dict[str, tuple[int, int]] = {}
        self.slotted_linears: list[SlottedLinear] = []
        self._dtype = dtype
        without_slots = []
        for name, layer in language_modules(model):
            if name.rsplit(".", 1)[-1] in SLOTTED_LINEARS and isinstance(layer, LinearBase):
                self._add_linear(shares(name, layer), layer)
            elif isinstance(layer, DeepseekV2AttentionMLA):
                self._add_latent(shares(f"{name}.kv_b_proj", layer.kv_b_proj), layer)
            elif isinstance(layer, FusedMoE) and isinstance(layer.quant_method, StoredExperts):
                self._add_experts(layer.quant_method, layer.num_local_experts)
            elif isinstance(layer, FusedMoE):
                self._add_experts_input(name, layer)
                without_slots.append(name)
        if not self.slotted_linears:
            raise ValueError(
                f"{type(model).__name__} has no linear named {', '.join(SLOTTED_LINEARS)} that an adapter with "
                f"{config.size_flag} {config.size} fits; serve a Qwen3, Llama, DeepSeek-V3 or Kimi-K2 model, or change {config.size_flag}"
            )
        if without_slots:
            logger.warning(
                "SGLang's own kernels compute the experts of %d layers, from %s on: they have %s; name targets accordingly, e.g. "
                "shared_experts.up_proj",
                len(without_slots),
                without_slots[0],
                "one rotation before gate and up" if config.experts == "common" else "no slots",
            )
        logger.info(
            "%s slots on %d linears, fused projections %s",
            config.type.upper(),
            len(self.slotted_linears),
            config.fused,
        )

    @property
    def device(self) -> torch.device:
        """Returns the device of this rank's slots."""
        return self.batch.slot_of_token_T.device

    def prepare(self, payload: bytes) -> PreparedAdapter:
        """Reads and checks a payload, and computes what its slot needs; it touches no slot.

        Raises:
            AdapterError: the payload does not fit this model or these slots; all problems listed.
        """
        adapter = Adapter.decode(payload)
        if problems := self._config.problems(adapter.config):
            raise AdapterError(problems)
        adapter.check(self._shapes)
        if problems := [problem for linear in self.slotted_linears for problem in linear.problems(adapter)]:
            raise AdapterError(problems)
        return PreparedAdapter(adapter, self.slotted_linears)

    def _add_linear(self, parts: dict[str, Share], layer: LinearBase) -> None:
        linear = self._slotted(parts)
        if linear is not None:
            AdaptedLayer(linear, layer, self.batch)

    def _add_latent(self, parts: dict[str, Share], attention: DeepseekV2AttentionMLA) -> None:
        """Adds an adapter of ``kv_b_proj`` that acts on its input.

        One of its output would change what all slots absorbed.
        """
        linear = self._slotted(parts) if self._config.method.acts_on_input else None
        if linear is not None:
            AdaptedLatent(linear, attention.kv_a_layernorm, self.batch)

    def _add_experts(self, method: StoredExperts, num_experts: int) -> None:
        if self._config.experts == "common":
            common = {group: self._slotted(method.linear(group, None)) for group in method.groups}
            found = {group: linear for group, linear in common.items() if linear is not None}
            method.adapter = CommonExpertAdapter(found, num_experts, self.batch)
            return
        each = {
            group: [self._slotted(method.linear(group, expert)) for expert in range(num_experts)]
            for group in method.groups
        }
        found = {group: linears for group, linears in each.items() if None not in linears}
        method.adapter = SlottedExperts(found, self.batch)

    def _add_experts_input(self, name: str, layer: FusedMoE) -> None:
        """Adds what acts on the input of all experts of a layer, in front of SGLang's own kernels."""
        if self._config.experts != "common":
            return
        share = Share.whole(layer.intermediate_size_per_partition * layer.moe_tp_size, layer.hidden_size)
        linear = self._slotted({expert_module(name, projection, None): share for projection in GATE_UP})
        if linear is not None:
            AdaptedExpertsInput(linear, layer, self.batch)

    def _slotted(self, parts: dict[str, Share]) -> SlottedLinear | None:
        """Returns slots for this rank's share of a linear.

        Where the method cannot adapt the linear it warns and returns None.
        """
        config = self._config
        self._shapes |= {part: share.shape for part, share in parts.items()}
        try:
            for part, share in parts.items():
                config.method.shapes(*share.shape, part)
        except ValueError as error:
            logger.warning("No slot: %s", error)
            return None
        split = config.fused == "split"
        linear = LINEARS[config.type](parts, config.method, split=split, dtype=self._dtype, device=self.device)
        self.slotted_linears.append(linear)
        return linear
