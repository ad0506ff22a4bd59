import pytest
import torch
from torch import nn
from verl.workers.config import McoreOptimizerConfig

from orbit_verl.model.layout import ParallelLayout
from orbit_verl.worker.optimizer import AdapterOptimizer, build_scheduler
from tests.support.engines import make_batch, make_engine, nll, randomise, sequences, train_step

FP32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def parallel_state(checkpoints):
    """The first engine of the process sets Megatron-Core's groups up."""
    make_engine(checkpoints["qwen3", FP32])


def make_parameters(dtype=FP32):
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(4, 6, generator=generator).to(dtype)) for name in ("a", "b")}


def config(**fields):
    return McoreOptimizerConfig(**{"lr": 1e-2, "total_training_steps": 10, "weight_decay": 0.1} | fields)


def make_optimizer(parameters, optim):
    return AdapterOptimizer(parameters, optim, ParallelLayout(), {name: p.shape for name, p in parameters.items()})


def quadratic(parameters, scale):
    return scale * sum((p.float() ** 3).sum() for p in parameters.values())


@pytest.mark.parametrize("clip", (1.0, 0.0), ids=("clipped", "unclipped"))
def test_steps_equal_torch_adamw(clip):
    ours, theirs = make_parameters(), make_parameters()
    optimizer = make_optimizer(ours, config(clip_grad=clip, betas=(0.8, 0.95)))
    reference = torch.optim.AdamW(theirs.values(), lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1)
    for scale in (0.01, 3.0, 0.5):
        optimizer.zero_grad()
        quadratic(ours, scale).backward()
        norm = optimizer.step()
        reference.zero_grad()
        quadratic(theirs, scale).backward()
        expected = nn.utils.clip_grad_norm_(theirs.values(), clip or torch.inf)
        reference.step()
        assert norm == pytest.approx(expected.item(), rel=1e-6)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-6)


def test_micro_batches_add_up_in_fp32():
    """1 + 255 * 2^-9 in bf16 stays 1 when it is added up in bf16."""
    parameters = {"a": nn.Parameter(torch.zeros(1, dtype=BF16))}
    optimizer = make_optimizer(parameters, config())
    for factor in (1.0, *[2.0**-9] * 255):
        (parameters["a"] * torch.tensor([factor], dtype=BF16)).sum().backward()
    assert optimizer.gradients()["a"].item() == 1.0 + 255 * 2.0**-9
    assert parameters["a"].grad is None


def test_masters_gather_updates_that_bf16_would_lose():
    parameters = {"a": nn.Parameter(torch.ones(1, dtype=BF16))}
    optimizer = make_optimizer(parameters, config(lr=1e-3, weight_decay=0.0))
    for _ in range(10):
        optimizer.zero_grad()
        parameters["a"].sum().backward()
        optimizer.step()
    # One step of 1e-3 rounds back to 1.0 in bf16, whose spacing below 1 is 2^-8.
    assert torch.tensor(1.0 - 1e-3).to(BF16) == 1.0
    assert parameters["a"].item() == torch.tensor(0.99).to(BF16).item()


@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
def test_a_gradient_that_is_not_finite_skips_the_step(checkpoints, bad, caplog):
    engine, tokens = make_engine(checkpoints["qwen3", FP32]), sequences()
    train_step(engine, tokens)
    before = {name: tensor.clone() for name, tensor in engine.optimizer.state_tensors().items()}

    def broken(model_output, data, dp_group=None):
        loss, metrics = nll(model_output, data, dp_group)
        return loss * bad, metrics

    _, norm = train_step(engine, tokens, broken)
    assert not torch.isfinite(torch.tensor(norm))
    assert engine.optimizer.num_skipped_steps == engine.optimizer.num_skipped_in_a_row == 1
    assert "step skipped" in caplog.text
    after = engine.optimizer.state_tensors()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert torch.isfinite(torch.tensor(train_step(engine, tokens)[1]))
    assert (engine.optimizer.num_skipped_steps, engine.optimizer.num_skipped_in_a_row) == (1, 0)


def test_gradients_of_micro_batches_equal_those_of_the_whole(checkpoints):
    engine = make_engine(checkpoints["qwen3", FP32])
    randomise(engine)
    results = []
    for size in (1, 4):
        with engine.train_mode(zero_grad_on_exit=False):
            engine.forward_backward_batch(make_batch(sequences(), micro_batch=size), nll)
        results.append(engine.optimizer.gradients())
        engine.optimizer_zero_grad()
    assert engine.optimizer.gradients() == {}
    for name, gradient in results[0].items():
        assert (gradient - results[1][name]).norm() <= 1e-5 * gradient.norm()


def test_schedule_warms_up_and_decays():
    optimizer = make_optimizer(make_parameters(), config())
    schedule = build_scheduler(optimizer, config(lr_warmup_steps=2, lr_decay_style="linear", min_lr=2e-3))
    rates = []
    for _ in range(11):
        rates.append(optimizer.param_groups[0]["lr"])
        schedule.step(1)
    assert rates[:3] == pytest.approx([0.0, 5e-3, 1e-2])
    assert rates[6] == pytest.approx((1e-2 + 2e-3) / 2)
    assert rates[10] == pytest.approx(2e-3)


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="optim.optimizer='muon'"):
        make_optimizer(make_parameters(), config(optimizer="muon"))
    with pytest.raises(ValueError, match="total_training_steps=-1"):
        build_scheduler(make_optimizer(make_parameters(), config()), config(total_training_steps=-1))
