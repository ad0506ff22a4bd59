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

from orbit_verl.model.architecture import DenseArchitecture
from orbit_verl.model.attention import CausalAttention
from orbit_verl.model.checkpoint import HFCheckpoint
from orbit_verl.model.linear import FrozenLinear, FrozenQKVLinear
from orbit_verl.model.modules import FrozenGPTModel, RMSNorm, residual_sum
from orbit_verl.model.naming import named_tensors

logger = logging.getLogger(__name__)


def transformer_config(architecture: DenseArchitecture, overrides: Mapping[str, Any]) -> TransformerConfig:
    """Megatron-Core's configuration of a frozen dense decoder.

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
    architecture: DenseArchitecture, config: TransformerConfig, folder: str | Path, device: torch.device
) -> FrozenGPTModel:
    """The model on ``device`` with the checkpoint's weights; nothing is allocated before the checkpoint is checked.

    Raises:
        ValueError: the folder is missing, or a tensor is missing, superfluous, of another shape, or would lose bits.
    """
    checkpoint = HFCheckpoint(folder)
    with torch.device("meta"):
        model = _empty_model(architecture, config)
    expected = {name: tensor.shape for name, tensor in named_tensors(model)}
    checkpoint.check(expected, optional=frozenset({"lm_head.weight"} if architecture.tied_embeddings else ()))
    model = model.to_empty(device=device).requires_grad_(False)
    model.rotary_pos_emb.inv_freq = architecture.inv_freq.to(device)
    _load(model, checkpoint)
    logger.info("loaded %d frozen tensors from %s as %s", len(expected), folder, config.params_dtype)
    return model


def _base_fields(architecture: DenseArchitecture) -> dict[str, Any]:
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


def _block_spec(architecture: DenseArchitecture) -> TransformerBlockSubmodules:
    layers = [_layer_spec(architecture)] * architecture.num_layers
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _layer_spec(architecture: DenseArchitecture) -> ModuleSpec:
    kv_rows = architecture.num_kv_heads * architecture.head_dim
    q_rows = architecture.num_heads * architecture.head_dim
    norm = RMSNorm if architecture.qk_norm else None
    attention = SelfAttentionSubmodules(
        linear_qkv=partial(FrozenQKVLinear, parts={"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}),
        core_attention=CausalAttention,
        linear_proj=partial(FrozenLinear, parts={"o_proj": architecture.hidden_size}),
        q_layernorm=norm,
        k_layernorm=norm,
    )
    mlp = MLPSubmodules(
        linear_fc1=partial(FrozenLinear, parts={"gate_proj": architecture.ffn_size, "up_proj": architecture.ffn_size}),
        linear_fc2=partial(FrozenLinear, parts={"down_proj": architecture.hidden_size}),
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
            ),
            self_attn_bda=residual_sum,
            pre_mlp_layernorm=RMSNorm,
            mlp=partial(MLP.as_mlp_submodule, submodules=mlp),
            mlp_bda=residual_sum,
        ),
    )


def _empty_model(architecture: DenseArchitecture, config: TransformerConfig) -> FrozenGPTModel:
    return FrozenGPTModel(
        config=config,
        transformer_layer_spec=_block_spec(architecture),
        vocab_size=architecture.vocab_size,
        max_sequence_length=architecture.max_positions,
        share_embeddings_and_output_weights=architecture.tied_embeddings,
        position_embedding_type="rope",
    )


@torch.no_grad()
def _load(model: FrozenGPTModel, checkpoint: HFCheckpoint) -> None:
    for name, target in named_tensors(model):
        source = checkpoint.tensor(name)
        if torch.promote_types(source.dtype, target.dtype) != target.dtype:
            raise ValueError(
                f"{name}: stored as {source.dtype}, but the model's dtype is {target.dtype}, which would lose bits; "
                "set the dtype in config.json to the stored one"
            )
        target.copy_(source)
    if model.share_embeddings_and_output_weights and "lm_head.weight" in checkpoint:
        head, embedding = checkpoint.tensor("lm_head.weight"), checkpoint.tensor("model.embed_tokens.weight")
        if not torch.equal(head, embedding):
            raise ValueError(
                "lm_head.weight differs from model.embed_tokens.weight, although config.json has tie_word_embeddings=true"
            )
