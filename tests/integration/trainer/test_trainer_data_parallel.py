import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trainer_support import make_engine, randomise, sequences, train_step

SCRIPT = Path(__file__).with_name("data_parallel_rank.py")


@pytest.fixture(scope="module")
def ranks(checkpoints, tmp_path_factory):
    """What each of two ranks ends with; the ranks' norms are of unequal halves of the batch."""
    out = tmp_path_factory.mktemp("data_parallel")
    arguments = ["2", str(out / "store"), str(checkpoints["qwen3", torch.float32]), str(out)]
    processes = [subprocess.Popen([sys.executable, SCRIPT, str(rank), *arguments]) for rank in range(2)]
    try:
        assert [process.wait(timeout=240) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    return out, [load_file(out / f"rank_{rank}.safetensors") for rank in range(2)]


@pytest.mark.slow
def test_two_ranks_equal_one_on_the_whole_batch(checkpoints, ranks):
    """Gradients are averaged before they are clipped, so that both ranks take the step of the whole batch."""
    _, (first, second) = ranks
    engine = make_engine(checkpoints["qwen3", torch.float32], optim={"clip_grad": 0.1})
    randomise(engine)
    norms = [train_step(engine, sequences(seed))[1] for seed in range(2)]
    assert min(norms) > 0.1
    assert first["norms"].tolist() == pytest.approx(norms, rel=1e-4)
    for name, tensor in engine.export_adapter().tensors.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], tensor, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_each_rank_saves_its_random_numbers(ranks):
    out, _ = ranks
    assert sorted(path.name for path in (out / "checkpoint").glob("rng_*")) == [
        "rng_rank_0.safetensors",
        "rng_rank_1.safetensors",
    ]
