"""This module puts together what the ranks that divide a model hold.

Every rank of the groups takes part in every call, in one order.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from verl.utils.device import get_device_id

from orbit_kernels.linears.names import layer_number
from orbit_kernels.linears.share import divided_dim
from orbit_verl.model.layout import ParallelLayout


def whole_tensors(
    names: Iterable[str],
    held: Callable[[str], Mapping[str, torch.Tensor]],
    shapes: Mapping[str, Sequence[int]],
    layout: ParallelLayout,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields copies of the tensors of all ranks, in the order in which one rank that held everything would list them.

    One layer's are gathered at a time: whoever drops what was yielded never holds more.

    Args:
        names: of this rank's tensors, layer by layer, a layer's experts in succession. The same on every rank of a
            stage but for the experts' numbers.
        held: what goes by a name, under names that contain it; ranks may differ in what there is of an expert. Scalars,
            and tensors of the shape that the rank holds; a layer's experts in one dtype.
        shapes: of the whole tensors by name.
        layout: what this rank holds.

    Raises:
        RuntimeError: while it is iterated, if what is held has changed since the call: the rest would be of another step.
    """
    names = list(names)
    versions = {name: _versions(held(name)) for name in names}

    def unchanged(name: str) -> Mapping[str, torch.Tensor]:
        found = held(name)
        if _versions(found) != versions[name]:
            raise RuntimeError(
                f"{name} has changed since its copies were asked for; take all of them before the next step"
            )
        return found

    return _of_all_stages(_of_stage(names, unchanged, shapes, layout), layout)


def _versions(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    """Returns what changes with a tensor: where it is, and torch's count of the writes to it."""
    return {name: (tensor.data_ptr(), tensor._version) for name, tensor in tensors.items()}


def whole_tensor(held: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Returns a copy of the tensor of that shape of which each tensor-parallel rank holds a part, or the whole."""
    dim = divided_dim(held.shape, shape)
    if dim is None:
        return held.detach().clone()
    # As bytes: gloo has no 8-bit floats, and NCCL not all of them.
    own = held.detach().to(get_device_id()).contiguous().view(torch.uint8)
    parts = [torch.empty_like(own) for _ in range(mpu.get_tensor_model_parallel_world_size())]
    dist.all_gather(parts, own, group=mpu.get_tensor_model_parallel_group())
    return torch.cat(parts, dim).view(held.dtype)


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Returns a value of each rank of a group, by rank."""
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def gather_scalars(value: float, group: dist.ProcessGroup) -> list[float]:
    """Returns a number of each rank of a group, by rank, in double precision."""
    own = torch.tensor([value], dtype=torch.float64, device=get_device_id())
    values = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(values, own, group=group)
    return torch.cat(values).tolist()


def _of_stage(
    names: Iterable[str],
    held: Callable[[str], Mapping[str, torch.Tensor]],
    shapes: Mapping[str, Sequence[int]],
    layout: ParallelLayout,
) -> Iterator[tuple[str, torch.Tensor]]:
    def whole(name: str) -> Iterator[tuple[str, torch.Tensor]]:
        return ((key, whole_tensor(part, shapes[name] if part.dim() else ())) for key, part in held(name).items())

    for experts, of_layer in itertools.groupby(names, layout.experts_of):
        tensors = itertools.chain.from_iterable(map(whole, of_layer))
        yield from tensors if experts is None else _of_expert_ranks(dict(tensors))


def _of_expert_ranks(own: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    group = mpu.get_expert_model_parallel_group()
    shapes_by_rank = gather_objects({name: tensor.shape for name, tensor in own.items()}, group)
    sizes = [sum(shape.numel() for shape in shapes.values()) for shapes in shapes_by_rank]
    flat = torch.cat([tensor.detach().flatten().to(get_device_id()) for tensor in own.values()])
    padded = torch.nn.functional.pad(flat, (0, max(sizes) - flat.numel()))
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    for shapes, size, tensors in zip(shapes_by_rank, sizes, gathered, strict=True):
        pieces = tensors[:size].split([shape.numel() for shape in shapes.values()])
        for (name, shape), piece in zip(shapes.items(), pieces, strict=True):
            yield name, piece.clone().view(shape)


def _of_all_stages(
    of_stage: Iterator[tuple[str, torch.Tensor]], layout: ParallelLayout
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each stage's tensors in turn, a layer at a time, on all stages."""
    if layout.pipeline.size == 1:
        yield from of_stage
        return
    for stage in range(layout.pipeline.size):
        if stage == layout.pipeline.rank:
            for _, of_layer in itertools.groupby(of_stage, lambda item: layer_number(item[0])):
                tensors = dict(of_layer)
                _broadcast(tensors, stage)
                yield from tensors.items()
            _broadcast({}, stage)
        else:
            while tensors := _broadcast(None, stage):
                yield from tensors.items()


def _broadcast(tensors: Mapping[str, torch.Tensor] | None, stage: int) -> Mapping[str, torch.Tensor]:
    """Sends a stage's tensors to the ranks in the same place of the other stages, as one message of bytes."""
    group = mpu.get_pipeline_model_parallel_group()
    header = [tensors and [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]]
    dist.broadcast_object_list(header, group=group, group_src=stage)
    described = header[0]
    if not described:
        return {}
    sizes = [shape.numel() * dtype.itemsize for _, shape, dtype in described]
    if tensors is None:
        message = torch.empty(sum(sizes), dtype=torch.uint8, device=get_device_id())
    else:
        message = torch.cat([tensor.to(get_device_id()).reshape(-1).view(torch.uint8) for tensor in tensors.values()])
    dist.broadcast(message, group=group, group_src=stage)
    if tensors is not None:
        return tensors
    pieces = zip(described, message.split(sizes), strict=True)
    return {name: piece.clone().view(dtype).view(shape) for (name, shape, dtype), piece in pieces}
