"""A real server on a Kimi-K2.5 whose routed experts are INT4: text alone, two versions and the base from one batch."""

import harness
import pytest
import quantized_models
import tiny_models
import torch
from harness import PROMPT, output_logprobs, prompt_logprobs, spans

from orbit_kernels.adapters import OFTMethod
from orbit_kernels.checkpoint.files import HFCheckpoint
from orbit_kernels.checkpoint.manifest import BaseManifest

FLAGS = ("--enable-orbit-slots", "--orbit-base-activations", "none", "--orbit-block-size", "16", "--dtype", "float32")
TOKENS = 24
LIMIT = 1e-4  # measured 4e-6


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Folder of the unquantised checkpoint."""
    folder = tmp_path_factory.mktemp("kimi") / "plain"
    return tiny_models.save_kimi_k25(folder, torch.bfloat16, initializer_range=0.1)


@pytest.fixture(scope="module")
def folder(plain):
    return quantized_models.save(plain, plain.parent / "int4", "int4", only=".experts.")


@pytest.fixture(scope="module")
def kimi(servers, folder):
    servers.stop()
    with harness.serve(folder, folder.parent / "log", *FLAGS) as server:
        yield server


def adapter(plain, seed: int):
    return quantized_models.random_adapter(plain, seed, OFTMethod(block_size=16))


def all_logprobs(answer: dict) -> torch.Tensor:
    return torch.tensor(prompt_logprobs(answer) + output_logprobs(answer))


def expected_logprobs(model, answer: dict) -> torch.Tensor:
    ids = PROMPT + answer["output_ids"]
    return quantized_models.logprobs(model, ids[:1], ids[1:]).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


def test_base_and_versions_equal_transformers_alone_and_in_one_batch(kimi, plain, folder):
    """Again from the prefix cache, which holds rotated latents by version."""
    base = kimi.generate(tokens=TOKENS)
    for seed in (1, 2):
        kimi.install(adapter(plain, seed))
    versions = kimi.status()["versions"]
    alone = [kimi.generate(tokens=TOKENS, orbit_version=version) for version in versions]
    models = [quantized_models.merged_model(plain, folder, own) for own in (None, adapter(plain, 1), adapter(plain, 2))]
    for version, model, answer in zip(versions, models, alone, strict=True):
        assert spans(answer) == [[version, 0, TOKENS]]
        assert (all_logprobs(answer) - expected_logprobs(model, answer)).abs().max() <= LIMIT
    assert alone[0]["output_ids"] == base["output_ids"] and all_logprobs(alone[0]).equal(all_logprobs(base))
    assert len({tuple(answer["output_ids"]) for answer in alone}) == 3

    together = answers_together(kimi, versions, logprob_start_len=0)
    cached = answers_together(kimi, versions, logprob_start_len=-1)
    for answer, mixed, from_cache in zip(alone, together, cached, strict=True):
        assert mixed["output_ids"] == from_cache["output_ids"] == answer["output_ids"]
        assert (all_logprobs(mixed) - all_logprobs(answer)).abs().max() <= LIMIT
        assert from_cache["meta_info"]["cached_tokens"] == len(PROMPT) - 1
        difference = torch.tensor(output_logprobs(from_cache)) - torch.tensor(output_logprobs(answer))
        assert difference.abs().max() <= LIMIT


def answers_together(server, versions: list[int], **fields) -> list[dict]:
    params = [
        {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True, "custom_params": {"orbit_version": version}}
        for version in versions
    ]
    body = {"input_ids": [PROMPT] * len(versions), "sampling_params": params, "return_logprob": True, **fields}
    return server.post("/generate", body).json()


def test_the_route_answers_the_manifest_of_the_files(kimi, folder):
    served = BaseManifest.from_json(kimi.get("/orbit/base").text)
    router = "language_model.model.layers.1.mlp.gate.e_score_correction_bias"
    assert served.tensors[router]["dtype"] == "float32"
    assert served.formats["language_model.model.layers.1.mlp.experts.0.up_proj"]["format"] == "int4"
    assert served.tensors.keys() == HFCheckpoint(folder).specs.keys()
