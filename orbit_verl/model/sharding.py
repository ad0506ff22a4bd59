"""Tensor parallelism divides the linears of a decoder (arXiv:1909.08053, section 3) as SGLang divides them too.

What reads the hidden state is divided by rows (Megatron's column parallelism), what writes to it by columns (row
parallelism). The down-projections to latents are every rank's, and so are routed experts unless the run divides each.
"""

from collections.abc import Mapping

import torch

from orbit_kernels.adapters.config import AdapterConfig
from orbit_kernels.families import DecoderArchitecture
from orbit_kernels.linears.fusing import LATENTS
from orbit_kernels.linears.names import EXPERTS, layer_number, without_expert
from orbit_kernels.linears.share import Share
from orbit_verl.model.layout import PIPELINE, TENSOR, GroupRank, ParallelLayout, ParallelSizes
from orbit_verl.model.tensors import ATTENTION_OUT, MLP_OUT, linear_formats, linear_shape


def linear_share(architecture: DecoderArchitecture, module: str, layout: ParallelLayout) -> Share:
    """Returns what a rank holds of a linear, by its Hugging Face name; ``check_tensor_parallel`` has been passed."""
    rows, columns = linear_shape(architecture, module)
    leaf = module.rpartition(".")[2]
    if leaf in LATENTS or (EXPERTS in module and not layout.divides_each_expert):
        return Share.whole(rows, columns)
    if leaf in (*ATTENTION_OUT, *MLP_OUT):
        return Share(shape=(rows, columns), rows=range(rows), columns=layout.tensor.part(columns))
    return Share(shape=(rows, columns), rows=layout.tensor.part(rows), columns=range(columns))


def check_tensor_parallel(architecture: DecoderArchitecture, sizes: ParallelSizes, adapter: AdapterConfig) -> None:
    """Holds a size of tensor parallelism against a model, the formats of its weights and the adapter.

    Raises:
        ValueError: heads, vocabulary, a block of weights or a block of an adapter would be cut; names the first.
    """
    size = sizes.tensor
    counts = {
        "attention heads": architecture.num_heads,
        "key and value heads": architecture.num_heads if architecture.latent else architecture.num_kv_heads,
        "tokens of the vocabulary": architecture.vocab_size,
    }
    for what, count in counts.items():
        if count % size:
            raise ValueError(f"{TENSOR}={size}: {count} {what} cannot be divided evenly; choose a divisor, e.g. 1")
    alike: dict[tuple, str] = {}
    for module, weight_format in linear_formats(architecture).items():
        share = linear_share(architecture, module, _rank(sizes, size - 1))
        targeted = adapter.targets(module) or adapter.targets(without_expert(module))
        alike.setdefault((share, weight_format, targeted), module)
    for (last, weight_format, targeted), module in alike.items():
        stored = {leaf: spec.shape for leaf, spec in weight_format.specs(*last.shape).items()}
        for share in (linear_share(architecture, module, _rank(sizes, rank)) for rank in range(size)):
            try:
                share.of(weight_format, _without_memory(stored))
                if targeted:
                    share.of(adapter.method, _without_memory(adapter.method.shapes(*share.shape, module)))
            except ValueError as error:
                raise ValueError(f"{TENSOR}={size}: {module}: {error}") from None


def check_stages(architecture: DecoderArchitecture, sizes: ParallelSizes, adapter: AdapterConfig) -> None:
    """Holds the stages of a pipeline against the adapter; ``ParallelSizes.check`` has been passed.

    Raises:
        ValueError: a stage has nothing to train.
    """
    if sizes.pipeline == 1:
        return
    modules = {*linear_formats(architecture), *map(without_expert, linear_formats(architecture))}
    targeted = {layer_number(module) for module in modules if adapter.targets(module)}
    for stage in sizes.stages(architecture.num_layers):
        if targeted.isdisjoint(stage):
            raise ValueError(
                f"{PIPELINE}={sizes.pipeline}: target_modules {list(adapter.target_modules)} match no linear of layers "
                f"{stage.start} to {stage.stop - 1}, a stage that would train nothing; set other targets, or other stages"
            )


def _rank(sizes: ParallelSizes, rank: int) -> ParallelLayout:
    return ParallelLayout(tensor=GroupRank(sizes.tensor, rank), divides_each_expert=sizes.expert_tensor > 1)


def _without_memory(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    return {leaf: torch.empty(shape, device="meta") for leaf, shape in shapes.items()}
