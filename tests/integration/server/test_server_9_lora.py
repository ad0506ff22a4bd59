"""LoRA in the slots: Llama with tied embeddings, an A of its own for each part, as peft trains it."""

import json

import pytest
import reference
import safetensors.torch
import tiny_models
import torch
from harness import PROMPT, output_logprobs, prompt_logprobs, spans

from orbit_kernels.adapters import LoRAMethod
from orbit_kernels.contract.payload import METADATA_KEY, Adapter

LORA = LoRAMethod(rank=4, alpha=6)


def adapter(seed: int, method: LoRAMethod = LORA, **fields) -> Adapter:
    return tiny_models.random_adapter(seed, method=method, tied=False, scale=0.2, **fields)


def all_logprobs(answer: dict) -> torch.Tensor:
    return torch.tensor(prompt_logprobs(answer) + output_logprobs(answer))


@pytest.mark.parametrize("targets", [tiny_models.LINEAR_TARGETS, ("v_proj", "o_proj", "up_proj")])
def test_equals_peft_per_token(lora, servers, tmp_path, targets):
    base = lora.generate(tokens=24)
    one = adapter(1, targets=targets)
    version = lora.install(one)
    answer = lora.generate(tokens=24)
    assert spans(answer) == [[version, 0, 24]]
    served = all_logprobs(answer)
    expected = reference.logprobs(servers.checkpoint("llama"), one, PROMPT + answer["output_ids"], tmp_path / "peft")
    assert (served[:23] - all_logprobs(base)[:23]).abs().max() > 0.1
    assert (served - expected).abs().max() <= 1e-4


def test_the_base_is_bitwise_the_same_beside_an_adapter(lora):
    before = lora.generate()
    lora.install(adapter(1))
    assert lora.generate()["output_ids"] != before["output_ids"]
    again = lora.generate(orbit_version=0)
    assert again["output_ids"] == before["output_ids"] and output_logprobs(again) == output_logprobs(before)


def test_base_and_two_versions_of_other_alpha_in_one_batch(lora):
    lora.install(adapter(1))
    lora.install(adapter(1, LoRAMethod(rank=4, alpha=12)))
    versions = lora.status()["versions"]
    alone = [lora.generate(tokens=24, orbit_version=version) for version in versions]
    assert len({tuple(answer["output_ids"]) for answer in alone}) == 3
    params = [
        {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True, "custom_params": {"orbit_version": version}}
        for version in versions
    ]
    body = {"input_ids": [PROMPT] * 3, "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
    together = lora.post("/generate", body).json()
    for version, one, mixed in zip(versions, alone, together, strict=True):
        assert spans(mixed) == [[version, 0, 24]] and mixed["output_ids"] == one["output_ids"]
        assert (all_logprobs(mixed) - all_logprobs(one)).abs().max() <= 1e-4


def test_a_module_that_the_next_version_leaves_out_is_the_base_again(lora):
    """field-cases #10: q_proj and down_proj, then q_proj alone in the same slot."""
    both, only = adapter(1, targets=("q_proj", "down_proj")), adapter(2, targets=("q_proj",))
    lora.install(both)
    lora.install(only)
    clean = lora.generate(tokens=24)
    lora.install(both)
    lora.install(both)
    reused = next(slot["slot"] for slot in lora.status()["slots"] if slot["state"] == "staged")
    lora.install(only)
    active = next(slot for slot in lora.status()["slots"] if slot["state"] == "active")
    assert active["slot"] == reused and active["modules"] == {"q_proj": 3} and active["adapter_type"] == "lora"
    again = lora.generate(tokens=24)
    assert again["output_ids"] == clean["output_ids"] and output_logprobs(again) == output_logprobs(clean)


def with_target(target: str) -> bytes:
    """A payload whose configuration names a target that no ``AdapterConfig`` accepts."""
    good = adapter(1)
    peft = {**good.config.to_peft(), "target_modules": ["q_proj", target]}
    tensors = {name: tensor.clone() for name, tensor in good.tensors.items()}
    return safetensors.torch.save(tensors, metadata={METADATA_KEY: json.dumps(peft)})


REFUSED = {
    "another type": (tiny_models.random_adapter(1), "start the server with --orbit-adapter oft"),
    "another rank": (adapter(1, LoRAMethod(rank=8)), "start the server with --orbit-rank 8"),
    "the head": (with_target("lm_head"), "tied to the embeddings"),
    "the embeddings": (with_target("embed_tokens"), "tied to the embeddings"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_slots_cannot_hold_is_refused_with_the_fix(lora, case):
    """field-cases #3, #7: the active slot is unchanged."""
    payload, fix = REFUSED[case]
    version = lora.install(adapter(3))
    before, slots = lora.generate(), lora.status()["slots"]
    response = lora.stage(version + 1, payload)
    assert response.status_code == 422
    assert fix in str(response.json()["error"])
    after = lora.generate()
    assert lora.status()["slots"] == slots
    assert after["output_ids"] == before["output_ids"] and output_logprobs(after) == output_logprobs(before)


def test_status_says_what_the_slots_hold(lora):
    assert lora.status()["adapter"] == {"type": "lora", "rank": 4, "fused": "split"}


def test_the_adapter_is_returned_as_it_was_staged(lora):
    one = adapter(5, dtype=torch.bfloat16)
    version = lora.install(one)
    assert Adapter.decode(lora.get("/orbit/adapter", version=version).content).digest() == one.digest()
