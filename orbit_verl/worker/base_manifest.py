"""This module says what the live base is, to the bit, over all ranks that hold it together."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from megatron.core import parallel_state as mpu

from orbit_kernels.checkpoint.manifest import BaseManifest, Cut
from orbit_kernels.families import DecoderArchitecture
from orbit_kernels.formats.int4 import SHAPE_LEAF
from orbit_verl.model.modules import FrozenGPTModel
from orbit_verl.model.naming import frozen_linears, plain_tensors
from orbit_verl.model.tensors import expected_tensors, linear_shape
from orbit_verl.worker.gathering import gather_objects, whole_tensor


def base_manifest(
    model: FrozenGPTModel, architecture: DecoderArchitecture, cuts: Mapping[str, Sequence[Cut]] | None = None
) -> BaseManifest:
    """Returns the format of each linear but the routers, and dtype, shape and digest of each tensor; all ranks call it.

    A tensor that ranks divide is put together to be digested, one at a time.

    Args:
        model: the trainer's.
        architecture: of the whole model.
        cuts: names of tensors that are to be digested in parts, and the parts.

    Raises:
        ValueError: ranks hold different things under one name.
    """
    formats = {
        f"{prefix}.{part}": stored.format
        for prefix, linear in frozen_linears(model)
        for part, stored in linear.stored_parts().items()
    }
    held = BaseManifest.of(formats, _whole_tensors(model, architecture), cuts)
    for group in (mpu.get_expert_model_parallel_group(), mpu.get_pipeline_model_parallel_group()):
        if group.size() > 1:
            held = BaseManifest.union(gather_objects(held, group))
    return held


def _whole_tensors(model: FrozenGPTModel, architecture: DecoderArchitecture) -> Iterator[tuple[str, torch.Tensor]]:
    expected = expected_tensors(architecture)
    for name, tensor in plain_tensors(model):
        yield name, _whole(tensor, expected[name].shape)
    for prefix, linear in frozen_linears(model):
        for part, stored in linear.stored_parts().items():
            shape = linear_shape(architecture, f"{prefix}.{part}")
            for leaf, spec in stored.format.specs(*shape).items():
                tensor = stored.tensors[leaf]
                whole = tensor.new_tensor(shape) if leaf == SHAPE_LEAF else _whole(tensor, spec.shape)
                yield f"{prefix}.{part}.{leaf}", whole


def _whole(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return tensor if tensor.shape == torch.Size(shape) else whole_tensor(tensor, shape)
