"""This module finds the tensors of a checkpoint again in SGLang's loaded parameters, until SGLang repacks them."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

from orbit_kernels.checkpoint.manifest import Cut
from orbit_kernels.formats import BaseScheme, Bf16Format, TensorSpec, WeightFormat
from orbit_kernels.formats.int4 import SHAPE_LEAF
from orbit_kernels.frozen.product import StoredWeight
from orbit_kernels.linears.share import Share, divided_dim
from orbit_sglang.model.naming import language_modules, part_names
from orbit_sglang.model.sharding import shares
from orbit_sglang.model.stored_experts import StoredExperts

UE8M0_NAN = 0xFF


def is_quantized(layer: LinearBase) -> bool:
    """Returns whether SGLang holds the weight in a low-precision format."""
    return not isinstance(layer.quant_method, UnquantizedLinearMethod)


def invalidate_scales(model: torch.nn.Module, scheme: BaseScheme) -> None:
    """Fills small tensors of quantised linears with values that ``check_values`` finds, should nothing be loaded.

    SGLang allocates parameters uninitialised, and only warns of a tensor of the checkpoint that it has no place for.
    """
    for name, module in language_modules(model):
        if isinstance(module, LinearBase) and is_quantized(module):
            leaves = scheme.format_of(part_names(name)[0]).value_leaves
            for parameter in (getattr(module, leaf) for leaf in leaves if leaf in dict(module.named_parameters())):
                if parameter.is_floating_point():
                    parameter.data.fill_(torch.nan)
                elif parameter.dtype == torch.uint8:
                    parameter.data.fill_(UE8M0_NAN)


def check_values(linears: Mapping[str, Mapping[str, StoredWeight]]) -> None:
    """Holds the loaded scales against what scales can be.

    Raises:
        ValueError: impossible values, of tensors that were not loaded for instance; all are listed.
    """
    problems = [
        f"{part}.{problem}"
        for parts in linears.values()
        for part, weight in parts.items()
        for problem in weight.format.problems({leaf: weight.tensors[leaf] for leaf in weight.format.value_leaves})
    ]
    if problems:
        raise ValueError(f"SGLang did not load the checkpoint as it is: {'; '.join(problems)}")


def stored_linears(model: torch.nn.Module, scheme: BaseScheme) -> dict[str, dict[str, StoredWeight]]:
    """Returns this rank's share of the parts of every linear inside the layers.

    They are given by SGLang's name and then by Hugging Face's. The tensors are views of SGLang's parameters, copies
    only where SGLang changed the dtype.

    Raises:
        ValueError: SGLang holds a linear in another format than the checkpoint has.
    """
    return {
        name: _stored_parts(name, module, scheme)
        for name, module in language_modules(model)
        if isinstance(module, LinearBase)
    }


def stored_experts(model: torch.nn.Module) -> dict[str, dict[str, StoredWeight]]:
    """Returns the projections of every expert that is held as stored.

    They are given by SGLang's name of the layer and then by Hugging Face's.
    """
    return {
        name: dict(module.quant_method.stored_by_name(module))
        for name, module in model.named_modules()
        if isinstance(module, FusedMoE) and isinstance(module.quant_method, StoredExperts)
    }


def checkpoint_tensors(
    model: torch.nn.Module, linears: Mapping[str, Mapping[str, StoredWeight]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields every tensor of the base by its name in the checkpoint.

    A shared one comes once, and vocabularies come without padding. A tensor that the ranks divide has its ``Cut``
    behind its name.
    """
    for name, module in language_modules(model):
        if isinstance(module, LinearBase) and name in linears:
            yield from _of_linear(shares(name, module), linears[name], module.bias)
        elif name in linears:  # experts
            for part, weight in linears[name].items():
                yield from ((f"{part}.{leaf}", tensor) for leaf, tensor in weight.tensors.items())
        elif isinstance(module, VocabParallelEmbedding):
            yield from _of_vocabulary(name, module)
        elif not isinstance(
            module, RadixAttention | FusedMoE
        ):  # scales of the KV cache; experts of SGLang's own kernels
            for leaf, parameter in module.named_parameters(recurse=False):
                yield f"{name}.{leaf}", parameter.detach()


def _of_linear(
    held: Mapping[str, Share], weights: Mapping[str, StoredWeight], bias: torch.Tensor | None
) -> Iterator[tuple[str, torch.Tensor]]:
    for part, weight in weights.items():
        share = held[part]
        whole = weight.format.specs(*share.shape)
        for leaf, tensor in weight.tensors.items():
            if leaf == SHAPE_LEAF:
                tensor = tensor.new_tensor(share.shape)
            yield _with_cut(f"{part}.{leaf}", share, whole[leaf].shape, tensor.shape), tensor
    if bias is not None:
        biases = bias.detach().split([weight.rows for weight in weights.values()])
        for (part, share), tensor in zip(held.items(), biases, strict=True):
            yield _with_cut(f"{part}.bias", share, share.shape[:1], tensor.shape), tensor


def _of_vocabulary(name: str, module: VocabParallelEmbedding) -> Iterator[tuple[str, torch.Tensor]]:
    held, size = module.shard_indices, module.org_vocab_size
    first, last = held.org_vocab_start_index, held.org_vocab_end_index
    cut = "" if last - first == size else Cut(0, first, last)
    for leaf, parameter in module.named_parameters(recurse=False):
        if last > first:  # a rank may hold nothing but padding
            yield f"{name}.{leaf}{cut}", parameter.detach()[: last - first]


def _with_cut(name: str, share: Share, whole: Sequence[int], held: Sequence[int]) -> str:
    """Returns the name of a stored tensor, with the range that this rank holds where that is not all of it."""
    dim = divided_dim(held, whole)
    if dim is None:
        return name
    held_range = share.columns if share.has_all_rows else share.rows
    start = held_range.start // len(held_range) * held[dim]
    return f"{name}{Cut(dim, start, start + held[dim])}"


def _stored_parts(name: str, layer: LinearBase, scheme: BaseScheme) -> dict[str, StoredWeight]:
    held_shares = shares(name, layer)
    parts, rows = tuple(held_shares), [len(share.rows) for share in held_shares.values()]
    columns = len(held_shares[parts[0]].columns)
    held = {leaf: value.detach() for leaf, value in layer.named_parameters(recurse=False) if leaf != "bias"}
    weight_format = _format(layer, parts, scheme)
    specs = [weight_format.specs(part_rows, columns) for part_rows in rows]
    if held.keys() != specs[0].keys():
        raise ValueError(
            f"{name}: SGLang holds {sorted(held)}, and the format {weight_format.name} has {sorted(specs[0])}; check "
            "the ignored layers of quantization_config against the checkpoint's tensors"
        )
    split = {leaf: _split(leaf, stack, [spec[leaf] for spec in specs], rows, columns) for leaf, stack in held.items()}
    return {
        part: StoredWeight(
            format=weight_format,
            rows=part_rows,
            columns=columns,
            tensors={leaf: tensors[index] for leaf, tensors in split.items()},
        )
        for index, (part, part_rows) in enumerate(zip(parts, rows, strict=True))
    }


def _format(layer: LinearBase, parts: Sequence[str], scheme: BaseScheme) -> WeightFormat:
    weight_format = scheme.common_format(parts)
    if isinstance(weight_format, Bf16Format) and not is_quantized(layer):
        return Bf16Format(dtype=layer.weight.dtype)  # the server's --dtype, not the file's
    return weight_format


def _split(
    leaf: str, stack: torch.Tensor, specs: Sequence[TensorSpec], rows: Sequence[int], columns: int
) -> list[torch.Tensor]:
    """Returns one parameter of SGLang's as the tensors of the parts."""
    if leaf == SHAPE_LEAF:
        # SGLang 0.5.12 loads the shapes of all parts over one another (compressed_tensors_wNa16.py::CompressedTensorsWNA16).
        return [torch.tensor([part_rows, columns], dtype=specs[0].dtype) for part_rows in rows]
    sizes = [spec.shape[0] if len(spec.shape) > 1 else 1 for spec in specs]
    tensors = stack.split(sizes)
    return [tensor.reshape(spec.shape).to(spec.dtype) for tensor, spec in zip(tensors, specs, strict=True)]
