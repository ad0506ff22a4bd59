"""The pairs of model family and fused mode that no other module serves."""

import pytest

from tests.support.adapters import random_adapter
from tests.support.references import peft_logprobs
from tests.support.server import PROMPT, all_logprobs


@pytest.mark.server("qwen3, split", "llama, tied")
def test_equals_peft_per_token(server, request, checkpoints):
    family, fused = request.node.callspec.params["running"].split(", ")
    adapter = random_adapter(1, tied=fused == "tied")
    server.install(adapter)
    answer = server.generate(tokens=24)
    served = all_logprobs(answer)
    ids = PROMPT + answer["output_ids"]
    expected = peft_logprobs(checkpoints.plain(family), adapter, ids)
    base = peft_logprobs(checkpoints.plain(family), None, ids)
    assert (expected - base).abs().max() > 0.1
    assert (served - expected).abs().max() <= 1e-4
