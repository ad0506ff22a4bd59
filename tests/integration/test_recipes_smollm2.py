"""The SmolLM2 recipe's base: what the GGUF file holds, as Hugging Face files that generate sensibly."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("smollm2")]


def test_configuration_is_that_of_the_gguf_file(smollm2):
    config = json.loads((smollm2 / "config.json").read_text())
    expected = {"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_key_value_heads": 3}
    expected |= {"tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16"}
    assert {key: config[key] for key in expected} == expected
    assert config["rope_parameters"]["rope_theta"] == 100000.0
    assert config["rms_norm_eps"] == pytest.approx(1e-5, rel=1e-6)
    assert json.loads((smollm2 / "generation_config.json").read_text())["eos_token_id"] == 2


def test_tokeniser_ends_turns_and_splits_digits(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert tokenizer.convert_ids_to_tokens(tokenizer("12+345 = 7").input_ids) == list("12+345") + ["Ġ=", "Ġ", "7"]
    text = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], add_generation_prompt=True, tokenize=False)
    assert text.endswith("<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n")


def test_greedy_answer_is_sensible_and_ends(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"
