"""This module builds Megatron-Core's GPTModel from one layer spec and fills it from a Hugging Face checkpoint."""

import dataclasses
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from orbit_kernels.checkpoint.files import HFCheckpoint
from orbit_kernels.experts import ChunkBuffer
from orbit_kernels.families import DecoderArchitecture
from orbit_kernels.linears.fusing import GATE_UP, LATENTS, QKV
from orbit_kernels.linears.names import EXPERTS, SHARED_EXPERT, layer_number
from orbit_verl.config.keys import BaseSettings
from orbit_verl.model.attention import CausalAttention
from orbit_verl.model.latent_attention import FrozenLatentAttention
from orbit_verl.model.layout import MEGATRON, STAGE, GroupRank, ParallelLayout, ParallelSizes
from orbit_verl.model.linear import FrozenLinear, FrozenQKVLinear
from orbit_verl.model.modules import FrozenGPTModel, RMSNorm, residual_sum
from orbit_verl.model.moe import FrozenExpert, FrozenMoE, SharedExpert
from orbit_verl.model.naming import frozen_linears, named_tensors, plain_tensors
from orbit_verl.model.router import FrozenBiasedRouter, FrozenRouter
from orbit_verl.model.sharding import linear_share
from orbit_verl.model.tensors import (
    ATTENTION_OUT,
    KEY_VALUE_UP,
    MLP_OUT,
    QUERY_UP,
    expected_tensors,
    fused_format,
    has_experts,
    layer_name,
    open_checkpoint,
)

logger = logging.getLogger(__name__)

UNDIVIDED = ParallelSizes()

_RECOMPUTED = {"core_attn", "mlp"}
"""Of ``recompute_modules``, these are Megatron-Core's modules in which the frozen model computes."""
# Fields of TransformerConfig that divide a model, of which this module makes no use: `ParallelSizes` says how it is divided.
_OTHER_DIVISIONS = (
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def transformer_config(
    architecture: DecoderArchitecture, overrides: Mapping[str, Any], sizes: ParallelSizes = UNDIVIDED
) -> TransformerConfig:
    """Returns Megatron-Core's configuration of a frozen decoder.

    Args:
        architecture: the model.
        sizes: how many ways it is divided.
        overrides: further TransformerConfig fields, e.g. ``recompute_granularity``; ``params_dtype`` may widen the
            base.

    Raises:
        ValueError: an override names no field of TransformerConfig, one that follows from ``sizes``, or modules that
            are not there to be recomputed; or Megatron-Core refuses the fields.
    """
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    unknown = sorted(overrides.keys() - known)
    if unknown:
        raise ValueError(f"override_transformer_config {unknown}: no such field of Megatron-Core's TransformerConfig")
    divided = _parallel_fields(sizes)
    if fixed := sorted(overrides.keys() & {*divided, *_OTHER_DIVISIONS}):
        raise ValueError(
            f"override_transformer_config {fixed}: follow from the sizes that divide the model; leave them out and set "
            f"{MEGATRON}.*_parallel_size, for uneven stages {STAGE.format('last')}"
        )
    if ignored := sorted(set(overrides.get("recompute_modules") or ()) - _RECOMPUTED):
        raise ValueError(
            f"override_transformer_config.recompute_modules {ignored}: of modules that Megatron-Core does not make here; choose "
            f"from {sorted(_RECOMPUTED)}, or set recompute_granularity=full"
        )
    fields = _base_fields(architecture) | divided | dict(overrides)
    if isinstance(fields["params_dtype"], str):
        fields["params_dtype"] = getattr(torch, fields["params_dtype"])
    try:
        return TransformerConfig(**fields)
    except (AssertionError, ValueError) as error:
        raise ValueError(f"{MEGATRON}.override_transformer_config: {error}") from error


def build_model(
    architecture: DecoderArchitecture,
    base: BaseSettings,
    config: TransformerConfig,
    folder: str | Path,
    device: torch.device,
    layout: ParallelLayout,
) -> FrozenGPTModel:
    """Builds the model on ``device`` from the checkpoint, which is checked before anything is allocated.

    The rank holds what ``layout`` gives to it, and reads no other layers and experts.

    Raises:
        ValueError: ``open_checkpoint`` refuses the folder.
    """
    architecture = dataclasses.replace(architecture, dtype=config.params_dtype)
    checkpoint = open_checkpoint(architecture, folder, layout.holds)
    model = empty_model(architecture, base, config, device, layout)
    assert {name for name, _ in named_tensors(model) if layer_number(name) is not None} == {
        name for name in expected_tensors(architecture) if layout.holds(name)
    }
    _load(model, checkpoint, layout.tensor)
    logger.info("loaded the frozen base from %s, activations in %s", folder, config.params_dtype)
    return model


def empty_model(
    architecture: DecoderArchitecture,
    base: BaseSettings,
    config: TransformerConfig,
    device: torch.device,
    layout: ParallelLayout,
) -> FrozenGPTModel:
    """Builds the model on ``device`` with memory for its tensors, which hold anything."""
    buffer = ChunkBuffer(base.experts_per_chunk)
    layers = [
        _layer_spec(architecture, base, layout, buffer, layer) for layer in layout.layers_of(architecture.num_layers)
    ]
    with torch.device("meta"):
        model = FrozenGPTModel(
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm),
            vocab_size=architecture.vocab_size,
            max_sequence_length=architecture.max_positions,
            share_embeddings_and_output_weights=architecture.tied_embeddings,
            position_embedding_type="rope",
            checkpoint_prefix=architecture.prefix,
            pre_process=layout.pipeline.rank == 0,
            post_process=layout.pipeline.rank == layout.pipeline.size - 1,
        )
    model = model.to_empty(device=device).requires_grad_(False)
    model.rotary_pos_emb.inv_freq = architecture.inv_freq.to(device)
    return model


def _base_fields(architecture: DecoderArchitecture) -> dict[str, Any]:
    return {
        "num_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "ffn_hidden_size": architecture.ffn_size,
        "num_attention_heads": architecture.num_heads,
        "num_query_groups": architecture.num_kv_heads,
        "kv_channels": architecture.head_dim,
        "layernorm_epsilon": architecture.norm_eps,
        "normalization": "RMSNorm",
        "qk_layernorm": architecture.qk_norm,
        "rotary_interleaved": architecture.latent is not None,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "params_dtype": architecture.dtype,
        # The hidden state between layers is the fp32 residual sum, see orbit_verl/model/modules.py.
        "pipeline_dtype": torch.float32,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "transformer_impl": "local",
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
    }


def _parallel_fields(sizes: ParallelSizes) -> dict[str, Any]:
    """Returns the fields of the division; experts are not Megatron-Core's, so it learns nothing of theirs."""
    return {
        "tensor_model_parallel_size": sizes.tensor,
        "sequence_parallel": sizes.tensor > 1,
        "pipeline_model_parallel_size": sizes.pipeline,
        "variable_seq_lengths": sizes.pipeline > 1,
        # Megatron-Core's other dispatchers refuse that, in a dense model too.
        "moe_token_dispatcher_type": "alltoall",
        # A stage that has the tied head loads it from the checkpoint, instead of asking the first stage for it.
        "init_model_with_meta_device": True,
    }


def _layer_spec(
    architecture: DecoderArchitecture, base: BaseSettings, layout: ParallelLayout, buffer: ChunkBuffer, layer: int
) -> ModuleSpec:
    attention = _attention if architecture.latent is None else _latent_attention
    if has_experts(architecture, layer):
        mlp = _moe(architecture, base, layout, buffer, layer)
    else:
        parent = f"{layer_name(architecture, layer)}.mlp"
        fc1, fc2 = (_linear(architecture, base, layout, FrozenLinear, parent, parts) for parts in (GATE_UP, MLP_OUT))
        mlp = partial(MLP.as_mlp_submodule, submodules=MLPSubmodules(linear_fc1=fc1, linear_fc2=fc2))
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention(architecture, base, layout, layer),
            self_attn_bda=residual_sum,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=residual_sum,
        ),
    )


def _attention(architecture: DecoderArchitecture, base: BaseSettings, layout: ParallelLayout, layer: int) -> ModuleSpec:
    parent = f"{layer_name(architecture, layer)}.self_attn"
    norm = RMSNorm if architecture.qk_norm else None
    submodules = SelfAttentionSubmodules(
        linear_qkv=_linear(architecture, base, layout, FrozenQKVLinear, parent, QKV),
        core_attention=CausalAttention,
        linear_proj=_linear(architecture, base, layout, FrozenLinear, parent, ATTENTION_OUT),
        q_layernorm=norm,
        k_layernorm=norm,
    )
    return ModuleSpec(module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=submodules)


def _latent_attention(
    architecture: DecoderArchitecture, base: BaseSettings, layout: ParallelLayout, layer: int
) -> ModuleSpec:
    make = partial(_made_linear, architecture, base, layout, f"{layer_name(architecture, layer)}.self_attn")
    linears = {
        "latents": partial(make, LATENTS),
        "queries": partial(make, QUERY_UP),
        "keys_values": partial(make, KEY_VALUE_UP),
        "output": partial(make, ATTENTION_OUT),
    }
    return ModuleSpec(module=FrozenLatentAttention, params={"architecture": architecture, **linears})


def _linear(
    architecture: DecoderArchitecture,
    base: BaseSettings,
    layout: ParallelLayout,
    kind: type[FrozenLinear],
    parent: str,
    parts: tuple[str, ...],
) -> partial:
    """Returns the maker of a linear for Megatron-Core, which knows its sizes."""
    shares = {part: linear_share(architecture, f"{parent}.{part}", layout) for part in parts}
    return partial(kind, shares=shares, weight_format=fused_format(architecture, parent, parts), base=base)


def _made_linear(
    architecture: DecoderArchitecture, base: BaseSettings, layout: ParallelLayout, parent: str, parts: tuple[str, ...]
) -> FrozenLinear:
    """Makes a linear of the checkpoint's size."""
    make = _linear(architecture, base, layout, FrozenLinear, parent, parts)
    shapes = [share.shape for share in make.keywords["shares"].values()]
    return make(shapes[0][1], sum(rows for rows, _ in shapes), bias=False)


def _moe(
    architecture: DecoderArchitecture, base: BaseSettings, layout: ParallelLayout, buffer: ChunkBuffer, layer: int
) -> partial:
    moe, prefix = architecture.moe, layer_name(architecture, layer)

    def expert(kind: type[FrozenExpert], parent: str) -> FrozenExpert:
        return kind(*(_made_linear(architecture, base, layout, parent, parts) for parts in (GATE_UP, MLP_OUT)))

    router = FrozenBiasedRouter if moe.scoring == "sigmoid" else FrozenRouter
    return partial(
        FrozenMoE,
        router=partial(router, moe=moe, hidden_size=architecture.hidden_size, dtype=architecture.dtype),
        expert=lambda index: expert(FrozenExpert, f"{prefix}{EXPERTS}{index}"),
        layout=layout,
        shared_expert=partial(expert, SharedExpert, f"{prefix}{SHARED_EXPERT}") if moe.shared_ffn_size else None,
        scale=moe.scale,
        base=base,
        buffer=buffer,
    )


@torch.no_grad()
def _load(model: FrozenGPTModel, checkpoint: HFCheckpoint, ranks: GroupRank) -> None:
    for name, target in plain_tensors(model):
        target.copy_(ranks.own(checkpoint.tensor(name), target.shape))
    for prefix, linear in frozen_linears(model):
        for part, stored in linear.stored_parts().items():
            share = linear.shares[part]
            whole = checkpoint.stored_weight(f"{prefix}.{part}", stored.format, *share.shape)
            tensors = share.of(stored.format, whole)
            for leaf, target in stored.tensors.items():
                target.copy_(tensors[leaf])
    head, embedding = (f"{model.checkpoint_prefix}{name}.weight" for name in ("lm_head", "model.embed_tokens"))
    if model.share_embeddings_and_output_weights and head in checkpoint:
        if not torch.equal(checkpoint.tensor(head), checkpoint.tensor(embedding)):
            raise ValueError(f"{head} differs from {embedding}, although config.json has tie_word_embeddings=true")
