"""SmolLM2-135M in four formats: the server's model against transformers on the dequantised weights, per token."""

import pytest
import torch
from transformers import AutoTokenizer

from orbit_kernels.checkpoint.manifest import BaseManifest
from tests.support import in_process, references
from tests.support.quantized import difference_from_files, quantize
from tests.support.references import transformers_model

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("smollm2")]
QUESTION = [{"role": "user", "content": "What is 37 plus 48? Answer with the number."}]
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def prompt(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    return tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=True)["input_ids"]


@pytest.mark.parametrize(
    "style", ["int4", *(pytest.param(style, marks=pytest.mark.long) for style in ("fp8", "nvfp4", "mxfp4"))]
)
def test_equals_transformers_on_the_dequantised_weights_per_token(smollm2, prompt, tmp_path, style):
    """In BF16, transformers itself is 0.02 from fp32 arithmetic on the same weights, and so the server may be."""
    folder = quantize(smollm2, tmp_path / style, style)
    tokens_32, served_32 = greedy(folder, prompt, "float32")
    tokens_16, served_16 = greedy(folder, prompt, "bfloat16")
    model = transformers_model(folder, torch.float32)
    error_32 = (served_32 - references.logprobs(model, prompt, tokens_32)).abs()
    assert error_32.max() <= 1e-4  # measured 6e-5, over the whole vocabulary

    rounded = transformers_model(folder, torch.bfloat16)
    model.load_state_dict(rounded.state_dict())
    exact, transformers = (references.logprobs(one, prompt, tokens_16) for one in (model, rounded))
    own_error, error_16 = (transformers - exact).abs(), (served_16 - exact).abs()
    assert 0 < error_16.mean() <= 1.5 * own_error.mean() and error_16.max() <= 2 * own_error.max()


def greedy(folder, prompt: list[int], dtype: str) -> tuple[list[int], torch.Tensor]:
    with in_process.served(folder, dtype=dtype, orbit_base_activations="none") as served:
        if dtype == "bfloat16":
            assert difference_from_files(folder, BaseManifest(**served.model.orbit_base)) is None
        return served.greedy(prompt, NUM_TOKENS)
