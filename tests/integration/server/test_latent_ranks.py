"""Latent attention on two ranks, which share out the heads; both hold the latents (experts have one rank on a CPU)."""

import torch

from orbit_kernels.adapters import OFTMethod
from orbit_kernels.checkpoint.manifest import BaseManifest
from tests.support import tiny_models
from tests.support.adapters import linears_of, random_adapter
from tests.support.configurations import TWO_RANKS
from tests.support.quantized import difference_from_files
from tests.support.references import merged_model, token_logprobs
from tests.support.server import PROMPT, all_logprobs, serve

FLAGS = ("--enable-orbit-slots", "--orbit-block-size", "16", "--dtype", "float32", *TWO_RANKS)
KV_B = "model.layers.1.self_attn.kv_b_proj.weight"


def test_base_and_adapter_equal_transformers_per_token(tmp_path):
    fields = {"first_k_dense_replace": 3, "initializer_range": 0.1}
    folder = tiny_models.save("deepseek_v3", tmp_path / "dense", torch.float32, **fields)
    adapter = random_adapter(1, linears_of(folder), method=OFTMethod(block_size=16))
    with serve(folder, tmp_path / "log", *FLAGS) as server:
        held = BaseManifest.from_json(server.get("/orbit/base").text)
        base = server.generate()
        server.install(adapter)
        adapted = server.generate()
    assert difference_from_files(folder, held) is None
    assert [str(cut) for cut in held.cuts[KV_B]] == ["[0, 0:80]", "[0, 80:160]"]
    assert adapted["output_ids"] != base["output_ids"]
    for answer, own in ((base, None), (adapted, adapter)):
        ids = PROMPT + answer["output_ids"]
        model = merged_model(folder, folder, own)
        difference = all_logprobs(answer) - token_logprobs(model, ids)
        assert difference.abs().max() <= 1e-4  # measured 4e-6
