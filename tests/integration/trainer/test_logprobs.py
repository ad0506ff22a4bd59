import pytest
import torch

from tests.support.engines import (
    load_reference,
    log_probs,
    make_engine,
    max_difference,
    randomise,
    reference_log_probs,
    sequences,
)

FAMILIES = ("qwen3", "llama")


@pytest.mark.parametrize("packed", (True, False), ids=("packed", "padded"))
@pytest.mark.parametrize("kind", FAMILIES)
def test_fp32_equals_transformers(checkpoints, kind, packed):
    path = checkpoints[kind, torch.float32]
    ours = log_probs(make_engine(path, packed=packed), sequences())
    with torch.no_grad():
        theirs = reference_log_probs(load_reference(path, torch.float32), sequences())
    assert max_difference(ours, theirs) <= 1e-5  # measured 2.9e-6


@pytest.mark.parametrize("kind", FAMILIES)
def test_bf16_is_as_close_to_fp32_as_transformers(checkpoints, kind):
    """The residual sum is normalised before it is rounded, as the server does it, so the bits differ from transformers'."""
    path, tokens = checkpoints[kind, torch.bfloat16], sequences()
    ours = torch.cat(log_probs(make_engine(path), tokens))
    with torch.no_grad():
        theirs = torch.cat(reference_log_probs(load_reference(path, torch.bfloat16), tokens))
        truth = torch.cat(reference_log_probs(load_reference(path, torch.float32), tokens))
    reference_error = (theirs - truth).abs().mean()
    assert reference_error > 0
    assert (ours - truth).abs().mean() <= 1.1 * reference_error  # measured 0.62 and 0.70


def test_a_microbatch_split_does_not_change_fp32(checkpoints):
    engine = make_engine(checkpoints["qwen3", torch.float32])
    randomise(engine)
    whole, single = (log_probs(engine, sequences(), micro_batch=size) for size in (4, 1))
    assert max_difference(whole, single) <= 1e-5


def test_temperature_divides_the_logits(checkpoints):
    """docs/field-cases.md: temperature on both sides."""
    engine = make_engine(checkpoints["qwen3", torch.float32])
    for temperature, expected in ((1.0, -0.408), (0.5, -0.143)):
        output = engine._lm_head_logits_processor(
            torch.tensor([[[2.0, 1.0, 0.0]]]),
            torch.tensor([[0]]),
            torch.tensor([[temperature]]),
            calculate_sum_pi_squared=False,
            calculate_entropy=False,
            distillation_use_topk=False,
            distillation_only=False,
            logits_processor_func=None,
            batch=None,
            data_format="thd",
        )
        assert output["log_probs"].item() == pytest.approx(expected, abs=5e-4)
    tokens = sequences()
    with torch.no_grad():
        model = load_reference(checkpoints["qwen3", torch.float32], torch.float32)
        model.lm_head.weight.div_(0.5)
        theirs = reference_log_probs(model, tokens)
    assert max_difference(log_probs(engine, tokens, temperature=0.5), theirs) <= 1e-5
