"""A real server on a Kimi-K2.5 whose routed experts are INT4: text alone, two versions and the base from one batch."""

import pytest
import torch

from orbit_kernels.adapters import OFTMethod
from orbit_kernels.checkpoint.files import HFCheckpoint
from orbit_kernels.checkpoint.manifest import BaseManifest
from tests.support import tiny_models
from tests.support.adapters import linears_of, random_adapter
from tests.support.quantized import quantize
from tests.support.references import merged_model, token_logprobs
from tests.support.server import PROMPT, all_logprobs, output_logprobs, serve, spans

FLAGS = ("--enable-orbit-slots", "--orbit-base-activations", "none", "--orbit-block-size", "16", "--dtype", "float32")
TOKENS = 24
LIMIT = 1e-4  # measured 4e-6


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Folder of the unquantised checkpoint."""
    folder = tmp_path_factory.mktemp("kimi") / "plain"
    return tiny_models.save("kimi_k25", folder, torch.bfloat16, initializer_range=0.1)


@pytest.fixture(scope="module")
def folder(plain):
    return quantize(plain, plain.parent / "int4", "int4", only=".experts.")


@pytest.fixture(scope="module")
def kimi(folder):
    with serve(folder, folder.parent / "log", *FLAGS) as server:
        yield server


def adapter(plain, seed: int):
    return random_adapter(seed, linears_of(plain), method=OFTMethod(block_size=16))


def test_base_and_versions_equal_transformers_alone_and_in_one_batch(kimi, plain, folder):
    """Again from the prefix cache, which holds rotated latents by version."""
    base = kimi.generate(tokens=TOKENS)
    for seed in (1, 2):
        kimi.install(adapter(plain, seed))
    versions = kimi.status()["versions"]
    alone = [kimi.generate(tokens=TOKENS, orbit_version=version) for version in versions]
    models = [merged_model(plain, folder, own) for own in (None, adapter(plain, 1), adapter(plain, 2))]
    for version, model, answer in zip(versions, models, alone, strict=True):
        assert spans(answer) == [[version, 0, TOKENS]]
        assert (all_logprobs(answer) - token_logprobs(model, PROMPT + answer["output_ids"])).abs().max() <= LIMIT
    assert alone[0]["output_ids"] == base["output_ids"] and all_logprobs(alone[0]).equal(all_logprobs(base))
    assert len({tuple(answer["output_ids"]) for answer in alone}) == 3

    together = kimi.generate_on(versions, TOKENS)
    cached = kimi.generate_on(versions, TOKENS, logprob_start_len=-1)
    for answer, mixed, from_cache in zip(alone, together, cached, strict=True):
        assert mixed["output_ids"] == from_cache["output_ids"] == answer["output_ids"]
        assert (all_logprobs(mixed) - all_logprobs(answer)).abs().max() <= LIMIT
        assert from_cache["meta_info"]["cached_tokens"] == len(PROMPT) - 1
        difference = torch.tensor(output_logprobs(from_cache)) - torch.tensor(output_logprobs(answer))
        assert difference.abs().max() <= LIMIT


def test_the_route_answers_the_manifest_of_the_files(kimi, folder):
    served = BaseManifest.from_json(kimi.get("/orbit/base").text)
    router = "language_model.model.layers.1.mlp.gate.e_score_correction_bias"
    assert served.tensors[router]["dtype"] == "float32"
    assert served.formats["language_model.model.layers.1.mlp.experts.0.up_proj"]["format"] == "int4"
    assert served.tensors.keys() == HFCheckpoint(folder).specs.keys()
