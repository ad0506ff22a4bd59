"""Linears of the frozen base are held as they are stored, dequantised on use, never trained; an adapter sits on them.

Dimension suffixes: S sequence, B batch, T tokens (S * B), I input width, O output width.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import nn

from orbit_kernels.contract.options import Activations
from orbit_kernels.formats import Bf16Format, WeightFormat
from orbit_kernels.frozen.product import StoredWeight, frozen_matmul
from orbit_kernels.linears.share import Share
from orbit_verl.config.keys import BaseSettings
from orbit_verl.model.adapters import LinearAdapter


class _FusedInput(torch.autograd.Function):
    """A `_FusedInput` is what the deployed kernel feeds the GEMM of fused linears; it is the identity in backward."""

    @staticmethod
    def forward(ctx, x_TI: torch.Tensor, fused: Sequence[StoredWeight]) -> torch.Tensor:
        quantised_TI = fused[0].format.model_input(x_TI, [part.tensors for part in fused])
        return x_TI.view_as(x_TI) if quantised_TI is x_TI else quantised_TI

    @staticmethod
    def backward(ctx, grad_TI: torch.Tensor):
        return grad_TI, None


class FrozenHead(nn.Module):
    """A `FrozenHead` is the output layer in Megatron-Core's calls; ``weight`` is None when the embeddings are the head.

    With tensor parallelism a rank has a range of the vocabulary, and its logits for the whole sequence.

    Megatron-Core 0.18.0's own layer multiplies the strided, three-dimensional gradient of padded logits as it is
    (core/tensor_parallel/layers.py::LinearWithFrozenWeight.backward): on a CPU a training step of SmolLM2-135M then
    takes 17.5 s instead of 6.6 s.
    """

    def __init__(self, weight: nn.Parameter | None, *, divided: bool):
        super().__init__()
        self.weight, self._divided = weight, divided

    def forward(self, x_SBI: torch.Tensor, weight: torch.Tensor | None = None, **_megatron: Any):
        """Returns logits [S, B, vocabulary] of this or the given weight, and Megatron-Core's absent bias."""
        weight = self.weight if weight is None else weight
        if self._divided:
            x_SBI = gather_from_sequence_parallel_region(x_SBI)
        stored = StoredWeight(
            format=Bf16Format(dtype=weight.dtype),
            rows=weight.shape[0],
            columns=weight.shape[1],
            tensors={"weight": weight},
        )
        y_TO = frozen_matmul(x_SBI.flatten(0, 1), [stored], chunk_bytes=0, activations="none")
        return y_TO.unflatten(0, x_SBI.shape[:2]), None


class StoredStack(nn.Module):
    """A `StoredStack` has buffers with one or more parts in one format, stacked by rows.

    Args:
        weight_format: of the parts.
        parts: rows of each part, by leaf name.
        columns: I.
    """

    def __init__(self, weight_format: WeightFormat, parts: Mapping[str, int], columns: int):
        super().__init__()
        self._format, self._parts, self._columns = weight_format, dict(parts), columns
        for leaf, spec in weight_format.specs(sum(parts.values()), columns).items():
            self.register_buffer(leaf, torch.empty(spec.shape, dtype=spec.dtype))

    def whole(self) -> StoredWeight:
        """Returns all parts as one weight, on the buffers themselves."""
        return self._stored(sum(self._parts.values()), dict(self.named_buffers()))

    def by_part(self) -> dict[str, StoredWeight]:
        """Returns each part's weight, on views of the buffers."""
        whole, start, weights = self.whole(), 0, {}
        for part, rows in self._parts.items():
            alone = len(self._parts) == 1
            tensors = whole.tensors if alone else self._format.shard_rows(whole.tensors, start, start + rows)
            weights[part] = self._stored(rows, tensors)
            start += rows
        return weights

    def _stored(self, rows: int, tensors: Mapping[str, torch.Tensor]) -> StoredWeight:
        return StoredWeight(format=self._format, rows=rows, columns=self._columns, tensors=tensors)


class FrozenLinear(nn.Module):
    """A `FrozenLinear` is one or more frozen linears that read the same input, in Megatron-Core's calling convention.

    The parts are multiplied as one, stacked by rows in their Hugging Face order, as SGLang stacks them, so the base and
    a shared rotation need one GEMM. Packed parts keep tensors of their own, since scale blocks and global scales end
    with a part; plain ones share one buffer, so that their GEMM needs no copy.

    With tensor parallelism hidden states are divided by sequence (Megatron's sequence parallelism, arXiv:2205.05198): a
    linear divided by rows gathers its input, one divided by columns scatters the sum of the ranks' outputs, and
    adapters work on what the rank holds. I and O are then the rank's.

    Args:
        input_size: columns of the whole weight.
        output_size: rows of all parts of the whole weight.
        shares: what this rank holds of each part, by the Hugging Face leaf name.
        weight_format: how all parts are stored.
        base: how they are computed with.
        bias: always False; biased linears are refused with the checkpoint's configuration.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        /,
        *,
        shares: Mapping[str, Share],
        weight_format: WeightFormat,
        base: BaseSettings,
        bias: bool,
        **_megatron: Any,
    ):
        super().__init__()
        self.shares, self._base = dict(shares), base
        assert not bias and sum(share.shape[0] for share in shares.values()) == output_size
        assert self._share.shape[1] == input_size
        self.parts = {part: len(share.rows) for part, share in shares.items()}
        self.input_size = len(self._share.columns)
        plain = isinstance(weight_format, Bf16Format)
        stacks = [self.parts] if plain else [{part: rows} for part, rows in self.parts.items()]
        self.stacks = nn.ModuleList(StoredStack(weight_format, stack, self.input_size) for stack in stacks)
        self.adapter: LinearAdapter | None = None
        self.adapter_enabled = True

    @property
    def device(self) -> torch.device:
        """Returns the device on which the weights are."""
        return next(self.stacks[0].buffers()).device

    def stored_parts(self) -> dict[str, StoredWeight]:
        """Returns the parts as they are stored, by leaf name, on views of the buffers."""
        return {part: weight for stack in self.stacks for part, weight in stack.by_part().items()}

    def forward(self, x_SBI: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Returns outputs of all parts side by side [S, B, O] in the input's dtype, and Megatron-Core's absent bias."""
        y_SBO = self.of_rank(x_SBI)
        return y_SBO if self._share.has_all_columns else reduce_scatter_to_sequence_parallel_region(y_SBO), None

    def of_rank(self, x_SBI: torch.Tensor) -> torch.Tensor:
        """Returns what this rank adds to the output, which is all of it unless the ranks divide the columns."""
        return self._arrange(self._product(self.whole_sequence(x_SBI)))

    def whole_sequence(self, x_SBI: torch.Tensor) -> torch.Tensor:
        """Returns the input as the weight reads it, which is of all ranks' tokens where the ranks divide the rows."""
        return x_SBI if self._share.has_all_rows else gather_from_sequence_parallel_region(x_SBI)

    @property
    def _share(self) -> Share:
        """Returns any part's share, as all are divided alike."""
        return next(iter(self.shares.values()))

    def _product(self, x_SBI: torch.Tensor) -> torch.Tensor:
        weights = [stack.whole() for stack in self.stacks]
        if self.adapter is None or not self.adapter_enabled:
            return self._multiply(x_SBI, weights, self._base.activations)
        inputs = self.adapter.inputs(x_SBI)
        if len(inputs) == 1:
            return self.adapter.output(x_SBI, self._multiply(inputs[0], weights, self._base.activations))
        outputs = [
            self._multiply(self._as_deployed(part_input, weights), [part], "none")
            for part_input, part in zip(inputs, self.stored_parts().values(), strict=True)
        ]
        return self.adapter.output(x_SBI, torch.cat(outputs, dim=-1))

    def _as_deployed(self, x_SBI: torch.Tensor, weights: Sequence[StoredWeight]) -> torch.Tensor:
        """Returns a part's own input as the fused kernel reads it, whose static scale is one for all parts."""
        if self._base.activations == "none":
            return x_SBI
        return _FusedInput.apply(x_SBI.flatten(0, 1), weights).unflatten(0, x_SBI.shape[:2])

    def _multiply(self, x_SBI: torch.Tensor, weights: Sequence[StoredWeight], activations: Activations) -> torch.Tensor:
        """Returns ``x W^T``.

        Activations are flattened to two dimensions, as the server has them: torch picks its GEMM by shape and strides,
        and two GEMMs may differ in the last bit.
        """
        chunk_bytes = self._base.chunk_bytes
        y_TO = frozen_matmul(x_SBI.flatten(0, 1), weights, chunk_bytes=chunk_bytes, activations=activations)
        return y_TO.unflatten(0, x_SBI.shape[:2])

    def _arrange(self, y_SBO: torch.Tensor) -> torch.Tensor:
        return y_SBO


class FrozenQKVLinear(FrozenLinear):
    """A `FrozenQKVLinear` makes queries, keys and values.

    The output is regrouped as Megatron-Core reads it (one KV head and its queries a group).
    """

    def __init__(self, *args: Any, config: Any, **kwargs: Any):
        super().__init__(*args, config=config, **kwargs)
        self._num_groups = config.num_query_groups // config.tensor_model_parallel_size

    def _arrange(self, y_SBO: torch.Tensor) -> torch.Tensor:
        parts = y_SBO.split(list(self.parts.values()), dim=-1)
        return torch.cat([part.unflatten(-1, (self._num_groups, -1)) for part in parts], dim=-1).flatten(-2)
