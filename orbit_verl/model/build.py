"""Build Megatron-Core's GPTModel from one layer spec and fill it from a Hugging Face checkpoint."""

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

from orbit_kernels.checkpoint import HFCheckpoint
from orbit_kernels.experts import ChunkBuffer
from orbit_kernels.fusing import GATE_UP, QKV
from orbit_verl.config import BaseSettings
from orbit_verl.model.architecture import DecoderArchitecture
from orbit_verl.model.attention import CausalAttention
from orbit_verl.model.linear import FrozenLinear, FrozenQKVLinear
from orbit_verl.model.modules import FrozenGPTModel, RMSNorm, residual_sum
from orbit_verl.model.moe import FrozenExpert, FrozenMoE, FrozenRouter
from orbit_verl.model.naming import frozen_linears, named_tensors, plain_tensors
from orbit_verl.model.tensors import (
    ATTENTION_OUT,
    EXPERTS,
    MLP_OUT,
    expected_tensors,
    fused_format,
    has_experts,
    linear_shape,
    open_checkpoint,
)

logger = logging.getLogger(__name__)


def transformer_config(architecture: DecoderArchitecture, overrides: Mapping[str, Any]) -> TransformerConfig:
    """Megatron-Core's configuration of a frozen decoder.

    Args:
        architecture: the model.
        overrides: further TransformerConfig fields, e.g. ``recompute_granularity``; ``params_dtype`` may widen the base.

    Raises:
        ValueError: an override names no field of TransformerConfig.
    """
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    unknown = sorted(overrides.keys() - known)
    if unknown:
        raise ValueError(f"override_transformer_config {unknown}: no such field of Megatron-Core's TransformerConfig")
    fields = _base_fields(architecture) | dict(overrides)
    if isinstance(fields["params_dtype"], str):
        fields["params_dtype"] = getattr(torch, fields["params_dtype"])
    return TransformerConfig(**fields)


def build_model(
    architecture: DecoderArchitecture,
    base: BaseSettings,
    config: TransformerConfig,
    folder: str | Path,
    device: torch.device,
) -> FrozenGPTModel:
    """The model on ``device`` with the checkpoint's tensors; nothing is allocated before the checkpoint is checked.

    Raises:
        ValueError: ``open_checkpoint`` refuses the folder.
    """
    architecture = dataclasses.replace(architecture, dtype=config.params_dtype)
    checkpoint = open_checkpoint(architecture, folder)
    with torch.device("meta"):
        model = _empty_model(architecture, base, config)
    assert {name: tuple(tensor.shape) for name, tensor in named_tensors(model)} == {
        name: spec.shape for name, spec in expected_tensors(architecture).items()
    }
    model = model.to_empty(device=device).requires_grad_(False)
    model.rotary_pos_emb.inv_freq = architecture.inv_freq.to(device)
    _load(model, checkpoint)
    logger.info("loaded the frozen base from %s, activations in %s", folder, config.params_dtype)
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
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "params_dtype": architecture.dtype,
        # The hidden state between layers is the fp32 residual sum, see modules.py.
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


def _layer_spec(architecture: DecoderArchitecture, base: BaseSettings, buffer: ChunkBuffer, layer: int) -> ModuleSpec:
    prefix = f"model.layers.{layer}"
    linear = partial(_linear, architecture, base)
    norm = RMSNorm if architecture.qk_norm else None
    attention = SelfAttentionSubmodules(
        linear_qkv=linear(FrozenQKVLinear, f"{prefix}.self_attn", QKV),
        core_attention=CausalAttention,
        linear_proj=linear(FrozenLinear, f"{prefix}.self_attn", ATTENTION_OUT),
        q_layernorm=norm,
        k_layernorm=norm,
    )
    if has_experts(architecture, layer):
        mlp = _moe(architecture, base, buffer, layer)
    else:
        fc1, fc2 = (linear(FrozenLinear, f"{prefix}.mlp", parts) for parts in (GATE_UP, MLP_OUT))
        mlp = partial(MLP.as_mlp_submodule, submodules=MLPSubmodules(linear_fc1=fc1, linear_fc2=fc2))
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
            ),
            self_attn_bda=residual_sum,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=residual_sum,
        ),
    )


def _linear(
    architecture: DecoderArchitecture, base: BaseSettings, kind: type[FrozenLinear], parent: str, parts: tuple[str, ...]
) -> partial:
    rows = {part: linear_shape(architecture, f"{parent}.{part}")[0] for part in parts}
    return partial(kind, parts=rows, weight_format=fused_format(architecture, parent, parts), base=base)


def _moe(architecture: DecoderArchitecture, base: BaseSettings, buffer: ChunkBuffer, layer: int) -> partial:
    moe, hidden = architecture.moe, architecture.hidden_size

    def expert(index: int) -> FrozenExpert:
        parent = f"model.layers.{layer}{EXPERTS}{index}"
        gate_up, down = (_linear(architecture, base, FrozenLinear, parent, parts) for parts in (GATE_UP, MLP_OUT))
        return FrozenExpert(
            gate_up(hidden, len(GATE_UP) * moe.ffn_size, bias=False), down(moe.ffn_size, hidden, bias=False)
        )

    router = partial(
        FrozenRouter,
        num_experts=moe.num_experts,
        hidden_size=hidden,
        top_k=moe.top_k,
        normalized=moe.normalized,
        dtype=architecture.dtype,
    )
    return partial(FrozenMoE, router=router, expert=expert, num_experts=moe.num_experts, base=base, buffer=buffer)


def _empty_model(architecture: DecoderArchitecture, base: BaseSettings, config: TransformerConfig) -> FrozenGPTModel:
    buffer = ChunkBuffer(base.experts_per_chunk)
    layers = [_layer_spec(architecture, base, buffer, layer) for layer in range(architecture.num_layers)]
    return FrozenGPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm),
        vocab_size=architecture.vocab_size,
        max_sequence_length=architecture.max_positions,
        share_embeddings_and_output_weights=architecture.tied_embeddings,
        position_embedding_type="rope",
    )


@torch.no_grad()
def _load(model: FrozenGPTModel, checkpoint: HFCheckpoint) -> None:
    for name, target in plain_tensors(model):
        target.copy_(checkpoint.tensor(name))
    for prefix, linear in frozen_linears(model):
        for part, stored in linear.stored_parts().items():
            module = f"{prefix}.{part}"
            tensors = checkpoint.stored_weight(module, stored.format, stored.rows, stored.columns)
            for leaf, target in stored.tensors.items():
                target.copy_(tensors[leaf])
    if model.share_embeddings_and_output_weights and "lm_head.weight" in checkpoint:
        head, embedding = checkpoint.tensor("lm_head.weight"), checkpoint.tensor("model.embed_tokens.weight")
        if not torch.equal(head, embedding):
            raise ValueError(
                "lm_head.weight differs from model.embed_tokens.weight, although config.json has tie_word_embeddings=true"
            )
