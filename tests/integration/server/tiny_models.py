"""Tiny random checkpoints with a character tokeniser, and random adapters that fit them."""

import pathlib

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from orbit_kernels import oft
from orbit_kernels.adapter import LINEAR_TARGETS, AdapterConfig, tensor_name
from orbit_kernels.wire import Adapter

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
    "max_position_embeddings": 2048,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
MODULE_PARENTS = {"q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn"}


def save_qwen3(folder: pathlib.Path, dtype: torch.dtype) -> pathlib.Path:
    config = Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False)
    return _save(Qwen3ForCausalLM, config, folder, dtype)


def save_llama(folder: pathlib.Path, dtype: torch.dtype) -> pathlib.Path:
    config = LlamaConfig(**SIZES, head_dim=16, tie_word_embeddings=True)
    return _save(LlamaForCausalLM, config, folder, dtype)


def random_adapter(
    seed: int,
    *,
    targets: tuple[str, ...] = LINEAR_TARGETS,
    block_size: int = 32,
    tied: bool = True,
    scale: float = 0.05,
    dtype: torch.dtype = torch.float32,
) -> Adapter:
    """An adapter far enough from the identity to change tokens; tied ones share a tensor among fused parts."""
    generator = torch.Generator().manual_seed(seed)
    config = AdapterConfig(block_size=block_size, target_modules=targets)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(SIZES["num_hidden_layers"]):
        shared: dict[str, torch.Tensor] = {}
        for target in targets:
            width = SIZES["intermediate_size"] if target == "down_proj" else SIZES["hidden_size"]
            shape = (oft.num_blocks(width, block_size), oft.num_entries(block_size))
            entries = (scale * torch.randn(shape, generator=generator)).to(dtype)
            entries = shared.setdefault(FUSED.get(target, target), entries) if tied else entries
            tensors[tensor_name(f"model.layers.{layer}.{MODULE_PARENTS.get(target, 'mlp')}.{target}")] = entries
    return Adapter(tensors, config)


def _save(model_class, config, folder: pathlib.Path, dtype: torch.dtype) -> pathlib.Path:
    torch.manual_seed(0)
    model_class(config).to(dtype).save_pretrained(folder)
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
