"""Latent attention on two ranks, which share out the heads; both hold the latents (experts have one rank on a CPU)."""

import harness
import quantized_models
import tiny_models
import torch
from harness import PROMPT, TWO_RANKS, output_logprobs, prompt_logprobs

from orbit_kernels.adapters import OFTMethod
from orbit_kernels.checkpoint.manifest import BaseManifest

FLAGS = ("--enable-orbit-slots", "--orbit-block-size", "16", "--dtype", "float32", *TWO_RANKS)
KV_B = "model.layers.1.self_attn.kv_b_proj.weight"


def test_base_and_adapter_equal_transformers_per_token(servers, tmp_path):
    fields = {"first_k_dense_replace": 3, "initializer_range": 0.1}
    folder = tiny_models.save_deepseek_v3(tmp_path / "dense", torch.float32, **fields)
    adapter = quantized_models.random_adapter(folder, 1, OFTMethod(block_size=16))
    servers.stop()
    with harness.serve(folder, tmp_path / "log", *FLAGS) as server:
        held = BaseManifest.from_json(server.get("/orbit/base").text)
        base = server.generate()
        server.install(adapter)
        adapted = server.generate()
    assert quantized_models.difference_from_files(folder, held) is None
    assert [str(cut) for cut in held.cuts[KV_B]] == ["[0, 0:80]", "[0, 80:160]"]
    assert adapted["output_ids"] != base["output_ids"]
    for answer, own in ((base, None), (adapted, adapter)):
        ids = PROMPT + answer["output_ids"]
        model = quantized_models.merged_model(folder, folder, own)
        expected_TV = quantized_models.logprobs(model, ids[:1], ids[1:])
        served = torch.tensor(prompt_logprobs(answer) + output_logprobs(answer))
        difference = served - expected_TV.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert difference.abs().max() <= 1e-4  # measured 4e-6
