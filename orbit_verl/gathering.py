"""What the ranks of an expert group hold, put together. Every rank of the group takes part in every call."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from verl.utils.device import get_device_id

from orbit_verl.model.layout import ExpertLayout


def whole_tensors(
    names: Iterable[str], held: Callable[[str], Mapping[str, torch.Tensor]], layout: ExpertLayout
) -> Iterator[tuple[str, torch.Tensor]]:
    """Copies of the tensors of all ranks, in the order in which one rank that held all experts would list them.

    One layer's experts are gathered at a time: whoever drops what was yielded never holds more.

    Args:
        names: of this rank's tensors, a layer's experts in succession. The same on every rank but for the experts' numbers.
        held: what goes by a name, under names that contain it; ranks may differ in what there is. One dtype in a layer.
        layout: which experts this rank holds.
    """
    for experts, of_layer in itertools.groupby(names, layout.experts_of):
        own = {key: tensor for name in of_layer for key, tensor in held(name).items()}
        if experts is None:
            yield from ((key, tensor.detach().clone()) for key, tensor in own.items())
        else:
            yield from _of_all_ranks(own)


def gather_objects(value: Any) -> list[Any]:
    """A value of each rank, by rank."""
    group = mpu.get_expert_model_parallel_group()
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def gather_scalars(value: float) -> list[float]:
    """A number of each rank, by rank, in double precision."""
    group = mpu.get_expert_model_parallel_group()
    own = torch.tensor([value], dtype=torch.float64, device=get_device_id())
    values = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(values, own, group=group)
    return torch.cat(values).tolist()


def _of_all_ranks(own: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    shapes_by_rank = gather_objects({name: tensor.shape for name, tensor in own.items()})
    sizes = [sum(shape.numel() for shape in shapes.values()) for shapes in shapes_by_rank]
    flat = torch.cat([tensor.detach().flatten().to(get_device_id()) for tensor in own.values()])
    padded = torch.nn.functional.pad(flat, (0, max(sizes) - flat.numel()))
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=mpu.get_expert_model_parallel_group())
    for shapes, size, tensors in zip(shapes_by_rank, sizes, gathered, strict=True):
        pieces = tensors[:size].split([shape.numel() for shape in shapes.values()])
        for (name, shape), piece in zip(shapes.items(), pieces, strict=True):
            yield name, piece.clone().view(shape)
