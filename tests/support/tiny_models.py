"""Tiny random checkpoints of every family, with a character tokeniser."""

import json
import pathlib
from typing import Any

import safetensors.torch
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

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


# What the trainer's tests ask for: more tokens, longer rotary periods, weights that sharpen no attention.
TRAINED_SIZES = {
    **SIZES,
    "vocab_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
}
ROPE = {"rope_type": "default", "rope_theta": 1e6}
ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
TRAINED: dict[str, dict[str, Any]] = {
    "qwen3": {**TRAINED_SIZES, "head_dim": 32, "rope_parameters": ROPE},
    "llama": {**TRAINED_SIZES, "rope_parameters": ROPE_LLAMA3},
    "qwen3_moe": {
        **TRAINED_SIZES,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "head_dim": 32,
        "rope_parameters": ROPE,
    },
    # A small factor: a large one sharpens attention until fp32 gradients of the reference itself are not known to 1e-5.
    "deepseek_v3": {
        "vocab_size": 128,
        "initializer_range": 0.15,
        "rope_parameters": {**YARN, "factor": 4.0, "original_max_position_embeddings": 128},
    },
}
TRAINED["kimi_k25"] = TRAINED["deepseek_v3"]

# By family: the name of transformers' classes, and what its configuration has besides SIZES.
_EXPERTS = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
_LATENT = {**LATENT_SIZES, **PUBLISHED_FIELDS, "rope_parameters": YARN, "tie_word_embeddings": False}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"tie_word_embeddings": False}),
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3Moe", {**_EXPERTS, "head_dim": 16, "tie_word_embeddings": False}),
    "deepseek_v3": ("DeepseekV3", _LATENT),
    "kimi_k25": ("DeepseekV3", _LATENT),
}


def save(family: str, folder: pathlib.Path, dtype: torch.dtype, **fields) -> pathlib.Path:
    """Write the checkpoint of a family; ``fields`` change its configuration.

    DeepSeek-V3: the first of three layers is dense; a token may use the experts of one group of two. Kimi-K2.5: the same
    weights as its language model, without its vision tower.
    """
    name, own_fields = _FAMILIES[family]
    values = SIZES | own_fields | fields
    if family in ("qwen3", "llama"):
        values.setdefault("head_dim", values["hidden_size"] // values["num_attention_heads"])
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**values)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)
    _randomise_what_starts_equal(model)
    model.save_pretrained(folder)
    _save_tokenizer(folder)
    if family == "kimi_k25":
        _wrap_as_kimi(folder)
    return folder


def save_trained(family: str, folder: pathlib.Path, dtype: torch.dtype, **fields) -> pathlib.Path:
    """Write a checkpoint of a family in the sizes of TRAINED; ``fields`` change its configuration."""
    return save(family, folder, dtype, **TRAINED[family] | fields)


def _randomise_what_starts_equal(model: torch.nn.Module) -> None:
    """Norms, and the biases of routers, which are fp32 in every checkpoint: so that a tensor in another's place shows."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias = torch.randn(module.e_score_correction_bias.shape) * 0.1


def _wrap_as_kimi(folder: pathlib.Path) -> None:
    file, config_file = folder / "model.safetensors", folder / "config.json"
    tensors = {f"language_model.{name}": tensor for name, tensor in safetensors.torch.load_file(file).items()}
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    text = {**json.loads(config_file.read_text()), "model_type": "kimi_k2"}
    wrapper = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "dtype": text["dtype"]}
    config_file.write_text(json.dumps({**wrapper, "text_config": text, "vision_config": TINY_VISION}))


def _save_tokenizer(folder: pathlib.Path) -> None:
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
