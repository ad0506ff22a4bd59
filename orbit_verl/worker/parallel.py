"""Megatron-Core's groups of this process say what this rank holds of a model."""

from megatron.core import parallel_state as mpu
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from orbit_kernels.families import DecoderArchitecture
from orbit_verl.model.layout import EXPERT, EXPERT_TENSOR, PIPELINE, TENSOR, GroupRank, ParallelLayout, ParallelSizes


def check_groups(sizes: ParallelSizes) -> None:
    """Holds the sizes against the groups, which are made once a process.

    Raises:
        ValueError: an engine before had other sizes.
    """
    groups = {
        TENSOR: (sizes.tensor, mpu.get_tensor_model_parallel_world_size()),
        PIPELINE: (sizes.pipeline, mpu.get_pipeline_model_parallel_world_size()),
        EXPERT: (sizes.expert, mpu.get_expert_model_parallel_world_size()),
        EXPERT_TENSOR: (sizes.expert_tensor, mpu.get_expert_tensor_parallel_world_size()),
    }
    for key, (size, found) in groups.items():
        if size != found:
            raise ValueError(
                f"{key}={size}: this process already has groups of {found}; engines of one process must have the same"
            )


def layout_of_this_rank(architecture: DecoderArchitecture, config: TransformerConfig) -> ParallelLayout:
    """Returns what the groups and Megatron-Core's stages give this rank."""
    first = get_transformer_layer_offset(config)
    return ParallelLayout(
        num_experts=architecture.num_experts,
        expert=GroupRank(mpu.get_expert_model_parallel_world_size(), mpu.get_expert_model_parallel_rank()),
        tensor=GroupRank(mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()),
        divides_each_expert=mpu.get_expert_tensor_parallel_world_size() > 1,
        pipeline=GroupRank(mpu.get_pipeline_model_parallel_world_size(), mpu.get_pipeline_model_parallel_rank()),
        layers=range(first, first + get_num_layers_to_build(config)),
    )
