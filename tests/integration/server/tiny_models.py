"""Tiny random checkpoints with a character tokeniser, and random adapters that fit them."""

import pathlib
from collections.abc import Mapping

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from orbit_kernels.adapter import LINEAR_TARGETS, AdapterConfig, tensor_name
from orbit_kernels.methods import AdapterMethod, OFTMethod
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
    "max_position_embeddings": 16384,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
MODULE_PARENTS = {"q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn"}


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


def save_qwen3_moe(folder: pathlib.Path, dtype: torch.dtype) -> pathlib.Path:
    experts = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
    config = Qwen3MoeConfig(**SIZES, **experts, head_dim=16, tie_word_embeddings=False)
    return _save(Qwen3MoeForCausalLM, config, folder, dtype)


def save_llama(folder: pathlib.Path, dtype: torch.dtype, sizes: Mapping[str, int] = SIZES) -> pathlib.Path:
    config = LlamaConfig(**sizes, head_dim=sizes["hidden_size"] // 4, tie_word_embeddings=True)
    return _save(LlamaForCausalLM, config, folder, dtype)


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
