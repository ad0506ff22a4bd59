"""SmolLM2-135M in four formats: the trainer's model against the files and transformers on the dequantised weights."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from orbit_verl.config.keys import BaseSettings
from orbit_verl.worker.memory import resident_bytes
from tests.support.engines import log_probs, make_engine
from tests.support.quantized import difference_from_files, quantize
from tests.support.references import token_logprobs, transformers_model

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("smollm2")]
TEXT = "What is 37 plus 48? Answer with the number. The answer is 85, because 30 and 40 are 70, and 7 and 8 are 15."
FP32 = {"override_transformer_config": {"params_dtype": "float32"}}


@pytest.mark.parametrize(
    "style", ["int4", *(pytest.param(style, marks=pytest.mark.long) for style in ("fp8", "nvfp4", "mxfp4"))]
)
def test_equals_transformers_on_the_dequantised_weights_per_token(smollm2, tmp_path, style):
    """The bits of the files, no copy beside them, and per token what they mean.

    docs/field-cases.md: the same dequantised bits.
    """
    folder = quantize(smollm2, tmp_path / style, style)
    tokens = torch.tensor(AutoTokenizer.from_pretrained(smollm2)(TEXT).input_ids)
    base = BaseSettings(activations="none")
    engine = make_engine(folder, base=base, block_size=32)
    assert difference_from_files(folder, engine.base_manifest()) is None
    stored_bytes = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert resident_bytes(engine)["orbit/memory/base_bytes"] <= 1.1 * stored_bytes
    rounded = log_probs(engine, [tokens], micro_batch=1)[0]
    del engine
    ours = log_probs(make_engine(folder, base=base, engine=FP32, block_size=32), [tokens], micro_batch=1)[0]

    model = transformers_model(folder, torch.float32)
    assert (ours - token_logprobs(model, tokens.tolist())).abs().max() <= 1e-4  # measured 2e-5

    # In BF16, transformers itself is far from fp32 arithmetic on the same weights: it rounds the hidden state too.
    in_bf16 = transformers_model(folder, torch.bfloat16)
    model.load_state_dict(in_bf16.state_dict())
    exact, theirs = token_logprobs(model, tokens.tolist()), token_logprobs(in_bf16, tokens.tolist())
    error, own_error = (rounded - exact).abs(), (theirs - exact).abs()
    # Two roundings of the same sums in different orders: neither is always the smaller one.
    assert 0 < error.mean() <= 1.5 * own_error.mean() and error.max() <= 2 * own_error.max()
