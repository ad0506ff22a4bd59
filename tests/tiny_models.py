"""Tiny random checkpoints with a character tokeniser, and random adapters that fit them."""

import json
import pathlib
from collections.abc import Mapping

import safetensors.torch
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from orbit_kernels.adapters import AdapterMethod, OFTMethod
from orbit_kernels.adapters.config import LINEAR_TARGETS, AdapterConfig, tensor_name
from orbit_kernels.contract.payload import Adapter

VOCABULARY = "\x00\x01\x02 0123456789abcdefghijklmnopqrstuvwxyz+-*/=?.,:<>|_"
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
MODULE_PARENTS = {"q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn"}
# No width of attention stands in for another, and groups of 32 divide those of all inputs. YaRN stretches 64 positions to
# 16384.
LATENT_SIZES = {
    **SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
}
# Fields of every published configuration that SGLang reads and transformers does not know.
PUBLISHED_FIELDS = {
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 256.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

# The vision tower is built and never run; its tensors may be absent from a checkpoint.
TINY_VISION = {
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "init_pos_emb_height": 4,
    "init_pos_emb_width": 4,
    "vt_hidden_size": 32,
    "text_hidden_size": 64,
}

# Parts that end inside an FP8 block, and blocks cut off at the edges; every group size divides the widths. Logits are
# small: rounded to BF16, those of the other models would alone differ by more than what is tested.
RAGGED_SIZES = {
    **SIZES,
    "hidden_size": 160,
    "intermediate_size": 288,
    "num_hidden_layers": 2,
    "initializer_range": 0.02,
}


def save_qwen3(folder: pathlib.Path, dtype: torch.dtype, sizes: Mapping[str, int] = SIZES) -> pathlib.Path:
    config = Qwen3Config(**sizes, head_dim=sizes["hidden_size"] // 4, tie_word_embeddings=False)
    return _save(Qwen3ForCausalLM, config, folder, dtype)


def save_qwen3_moe(folder: pathlib.Path, dtype: torch.dtype, **fields) -> pathlib.Path:
    experts = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
    config = Qwen3MoeConfig(**SIZES | experts | {"head_dim": 16, "tie_word_embeddings": False} | fields)
    return _save(Qwen3MoeForCausalLM, config, folder, dtype)


def save_llama(folder: pathlib.Path, dtype: torch.dtype, sizes: Mapping[str, int] = SIZES) -> pathlib.Path:
    config = LlamaConfig(**sizes, head_dim=sizes["hidden_size"] // 4, tie_word_embeddings=True)
    return _save(LlamaForCausalLM, config, folder, dtype)


def save_deepseek_v3(folder: pathlib.Path, dtype: torch.dtype, **fields) -> pathlib.Path:
    """The first of three layers is dense; a token may use the experts of one group of two."""
    plain = {**LATENT_SIZES, **PUBLISHED_FIELDS, "rope_parameters": YARN, "tie_word_embeddings": False}
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**plain | fields)).to(dtype)
    _randomise_what_starts_equal(model)
    return _write(model, folder)


def save_kimi_k25(folder: pathlib.Path, dtype: torch.dtype, **fields) -> pathlib.Path:
    """The same weights as the language model of a Kimi-K2.5 without its vision tower."""
    save_deepseek_v3(folder, dtype, **fields)
    file, config_file = folder / "model.safetensors", folder / "config.json"
    tensors = {f"language_model.{name}": tensor for name, tensor in safetensors.torch.load_file(file).items()}
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    text = {**json.loads(config_file.read_text()), "model_type": "kimi_k2"}
    wrapper = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "dtype": text["dtype"]}
    config_file.write_text(json.dumps({**wrapper, "text_config": text, "vision_config": TINY_VISION}))
    return folder


def random_adapter(
    seed: int,
    *,
    method: AdapterMethod | None = None,
    targets: tuple[str, ...] = LINEAR_TARGETS,
    block_size: int = 32,
    tied: bool = True,
    scale: float = 0.05,
    dtype: torch.dtype = torch.float32,
    sizes: Mapping[str, int] = SIZES,
) -> Adapter:
    """An adapter, by default OFT, far enough from the identity to change tokens.

    The parts of a fused projection share what acts on the input in a tied one.
    """
    generator = torch.Generator().manual_seed(seed)
    method = method or OFTMethod(block_size=block_size)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(sizes["num_hidden_layers"]):
        shared: dict[str, torch.Tensor] = {}
        for target in targets:
            module = f"model.layers.{layer}.{MODULE_PARENTS.get(target, 'mlp')}.{target}"
            for leaf, shape in method.shapes(*linear_shape(target, sizes)).items():
                tensor = (scale * torch.randn(shape, generator=generator)).to(dtype)
                if tied and leaf == method.shared_leaf:
                    tensor = shared.setdefault(FUSED.get(target, target), tensor)
                tensors[tensor_name(module, leaf)] = tensor
    return Adapter(tensors, AdapterConfig(method=method, target_modules=targets))


def linear_shape(target: str, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Rows and columns of a linear of the tiny models, by its leaf name."""
    hidden, intermediate = sizes["hidden_size"], sizes["intermediate_size"]
    rows = {"k_proj": hidden // 2, "v_proj": hidden // 2, "gate_proj": intermediate, "up_proj": intermediate}
    return rows.get(target, hidden), intermediate if target == "down_proj" else hidden


def _randomise_what_starts_equal(model: torch.nn.Module) -> None:
    """Norms, and the biases of routers, which are fp32 in every checkpoint: so that a tensor in another's place shows."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias = torch.randn(module.e_score_correction_bias.shape) * 0.1


def _save(model_class, config, folder: pathlib.Path, dtype: torch.dtype) -> pathlib.Path:
    torch.manual_seed(0)
    return _write(model_class(config).to(dtype), folder)


def _write(model: PreTrainedModel, folder: pathlib.Path) -> pathlib.Path:
    model.save_pretrained(folder)
    vocabulary = {character: index for index, character in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="\x00",
        bos_token="\x01",
        eos_token="\x02",
        unk_token=".",
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
    return folder
