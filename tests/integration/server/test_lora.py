"""LoRA in the slots: Llama with tied embeddings, an A of its own for each part, as peft trains it."""

import json

import pytest
import safetensors.torch
import torch

from orbit_kernels.adapters import LoRAMethod
from orbit_kernels.adapters.config import LINEAR_TARGETS
from orbit_kernels.contract.payload import METADATA_KEY, Adapter
from tests.support.adapters import random_adapter
from tests.support.references import peft_logprobs
from tests.support.server import PROMPT, all_logprobs, output_logprobs, spans

pytestmark = pytest.mark.server("lora")

LORA = LoRAMethod(rank=4, alpha=6)


def adapter(seed: int, method: LoRAMethod = LORA, **fields) -> Adapter:
    return random_adapter(seed, method=method, tied=False, scale=0.2, **fields)


@pytest.mark.parametrize("targets", [LINEAR_TARGETS, ("v_proj", "o_proj", "up_proj")])
def test_equals_peft_per_token(server, checkpoints, tmp_path, targets):
    base = server.generate(tokens=24)
    one = adapter(1, targets=targets)
    version = server.install(one)
    answer = server.generate(tokens=24)
    assert spans(answer) == [[version, 0, 24]]
    served = all_logprobs(answer)
    expected = peft_logprobs(checkpoints.plain("llama"), one, PROMPT + answer["output_ids"])
    assert (served[:23] - all_logprobs(base)[:23]).abs().max() > 0.1
    assert (served - expected).abs().max() <= 1e-4


def test_the_base_is_bitwise_the_same_beside_an_adapter(server):
    before = server.generate()
    server.install(adapter(1))
    assert server.generate()["output_ids"] != before["output_ids"]
    again = server.generate(orbit_version=0)
    assert again["output_ids"] == before["output_ids"] and output_logprobs(again) == output_logprobs(before)


def test_base_and_two_versions_of_other_alpha_in_one_batch(server):
    server.install(adapter(1))
    server.install(adapter(1, LoRAMethod(rank=4, alpha=12)))
    versions = server.status()["versions"]
    alone = [server.generate(tokens=24, orbit_version=version) for version in versions]
    assert len({tuple(answer["output_ids"]) for answer in alone}) == 3
    together = server.generate_on(versions, tokens=24)
    for version, one, mixed in zip(versions, alone, together, strict=True):
        assert spans(mixed) == [[version, 0, 24]] and mixed["output_ids"] == one["output_ids"]
        assert (all_logprobs(mixed) - all_logprobs(one)).abs().max() <= 1e-4


def test_a_module_that_the_next_version_leaves_out_is_the_base_again(server):
    """q_proj and down_proj, then q_proj alone in the same slot. docs/field-cases.md: what the version before left."""
    both, only = adapter(1, targets=("q_proj", "down_proj")), adapter(2, targets=("q_proj",))
    server.install(both)
    server.install(only)
    clean = server.generate(tokens=24)
    server.install(both)
    server.install(both)
    reused = next(slot["slot"] for slot in server.status()["slots"] if slot["state"] == "staged")
    server.install(only)
    active = next(slot for slot in server.status()["slots"] if slot["state"] == "active")
    assert active["slot"] == reused and active["modules"] == {"q_proj": 3} and active["adapter_type"] == "lora"
    again = server.generate(tokens=24)
    assert again["output_ids"] == clean["output_ids"] and output_logprobs(again) == output_logprobs(clean)


def with_target(target: str) -> bytes:
    """A payload whose configuration names a target that no ``AdapterConfig`` accepts."""
    good = adapter(1)
    peft = {**good.config.to_peft(), "target_modules": ["q_proj", target]}
    tensors = {name: tensor.clone() for name, tensor in good.tensors.items()}
    return safetensors.torch.save(tensors, metadata={METADATA_KEY: json.dumps(peft)})


REFUSED = {
    "another type": (random_adapter(1), "start the server with --orbit-adapter oft"),
    "another rank": (adapter(1, LoRAMethod(rank=8)), "start the server with --orbit-rank 8"),
    "the head": (with_target("lm_head"), "tied to the embeddings"),
    "the embeddings": (with_target("embed_tokens"), "tied to the embeddings"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_slots_cannot_hold_is_refused_with_the_fix(server, case):
    """The active slot is unchanged. docs/field-cases.md: names that fit nothing; tied embeddings."""
    payload, fix = REFUSED[case]
    version = server.install(adapter(3))
    before, slots = server.generate(), server.status()["slots"]
    response = server.stage(version + 1, payload)
    assert response.status_code == 422
    assert fix in str(response.json()["error"])
    after = server.generate()
    assert server.status()["slots"] == slots
    assert after["output_ids"] == before["output_ids"] and output_logprobs(after) == output_logprobs(before)


def test_status_says_what_the_slots_hold(server):
    assert server.status()["adapter"] == {"type": "lora", "rank": 4, "fused": "split"}


def test_the_adapter_is_returned_as_it_was_staged(server):
    one = adapter(5, dtype=torch.bfloat16)
    version = server.install(one)
    assert Adapter.decode(server.get("/orbit/adapter", version=version).content).digest() == one.digest()


@pytest.mark.parametrize("params", [{"stop": ["a"]}, {"stop_regex": ["a+"]}, {"min_new_tokens": 2}])
def test_what_needs_a_tokeniser_is_refused_without_one(server, params):
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4, **params}}
    response = server.post("/generate", body)
    assert response.status_code == 400 and "--skip-tokenizer-init" in response.text
    assert len(server.generate(tokens=4)["output_ids"]) == 4
