"""The remaining pairs of model family and fused mode; each starts a server of its own."""

import pytest
import reference
import tiny_models
import torch
from harness import PROMPT, output_logprobs, prompt_logprobs


@pytest.mark.slow
@pytest.mark.parametrize("family, fused", [("qwen3", "split"), ("llama", "tied")])
def test_equals_peft_per_token(servers, tmp_path, family, fused):
    server = servers.get(family, "--enable-orbit-slots", "--dtype", "float32", "--orbit-fused", fused)
    adapter = tiny_models.random_adapter(1, tied=fused == "tied")
    server.install(adapter)
    answer = server.generate(tokens=24)
    served = torch.tensor(prompt_logprobs(answer) + output_logprobs(answer))
    ids = PROMPT + answer["output_ids"]
    expected = reference.logprobs(servers.checkpoint(family), adapter, ids, tmp_path / "peft")
    base = reference.logprobs(servers.checkpoint(family), None, ids, tmp_path / "base")
    assert (expected - base).abs().max() > 0.1
    assert (served - expected).abs().max() <= 1e-4
