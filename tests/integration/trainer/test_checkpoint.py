import json
import pickle
import random

import numpy as np
import pytest
import torch

from orbit_verl.worker import checkpoint
from tests.support.engines import log_probs, make_engine, max_difference, sequences, train_step

FP32, BF16 = torch.float32, torch.bfloat16
SCHEDULE = {"lr": 5e-3, "total_training_steps": 6, "lr_warmup_steps": 2, "lr_decay_style": "cosine", "min_lr": 1e-4}


def start(checkpoints, **options):
    return make_engine(checkpoints["qwen3", BF16], dtype="bf16", optim=SCHEDULE, **options)


def state_of(engine):
    tensors = {name: tensor.clone() for name, tensor in engine.optimizer.state_tensors().items()}
    return tensors | engine.export_adapter().tensors


def assert_equal_states(left, right):
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.mark.parametrize("method", ({}, {"type": "lora", "rank": 4}), ids=("oft", "lora"))
def test_six_steps_equal_three_resume_three(checkpoints, tmp_path, method):
    """The default resume restores everything. docs/field-cases.md: two kinds of resume."""
    whole, first = start(checkpoints, **method), start(checkpoints, **method)
    batches = [sequences(seed) for seed in range(6)]
    losses = [train_step(whole, batch)[0] for batch in batches]
    for batch in batches[:3]:
        train_step(first, batch)
    first.adapter_version = 3
    first.save_checkpoint(str(tmp_path / "step_3"), global_step=3)

    resumed = start(checkpoints, **method)
    resumed.load_checkpoint(str(tmp_path / "step_3"))
    assert resumed.adapter_version == 3
    assert [train_step(resumed, batch)[0] for batch in batches[3:]] == losses[3:]
    assert_equal_states(state_of(resumed), state_of(whole))
    assert resumed.lr_scheduler.num_steps == whole.lr_scheduler.num_steps == 6


def test_without_the_optimizer_moments_are_fresh_and_the_step_is_restored(checkpoints, tmp_path):
    """docs/field-cases.md: two kinds of resume."""
    engine = start(checkpoints)
    for seed in range(3):
        train_step(engine, sequences(seed))
    engine.save_checkpoint(str(tmp_path / "step_3"))
    resumed = start(checkpoints, contents=("model", "extra"))
    resumed.load_checkpoint(str(tmp_path / "step_3"))
    assert max_difference(log_probs(engine, sequences()), log_probs(resumed, sequences())) == 0
    assert resumed.lr_scheduler.num_steps == 3
    assert resumed.optimizer.param_groups[0]["lr"] == engine.optimizer.param_groups[0]["lr"]
    assert not [name for name in resumed.optimizer.state_tensors() if not name.startswith("master/")]


def test_a_checkpoint_holds_no_pickle_and_a_peft_folder(checkpoints, tmp_path):
    engine = start(checkpoints)
    train_step(engine, sequences())
    folder = tmp_path / "step_1"
    engine.save_checkpoint(str(folder))
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
        "optimizer.safetensors",
        "rng_rank_0.safetensors",
        "state.json",
    }
    assert json.loads((folder / "state.json").read_text())["base_digest"] == engine.base_digest()


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


@pytest.mark.parametrize(
    "name", ("adapter/adapter_model.safetensors", "optimizer.safetensors", "rng_rank_0.safetensors", "state.json")
)
def test_a_pickle_in_a_checkpoint_is_refused_without_a_side_effect(checkpoints, tmp_path, name):
    """docs/field-cases.md: pickle in a checkpoint."""
    engine = start(checkpoints)
    train_step(engine, sequences())
    engine.save_checkpoint(str(tmp_path / "ckpt"))
    marker = tmp_path / "marker"
    (tmp_path / "ckpt" / name).write_bytes(pickle.dumps(Trap(marker), protocol=0))
    before = state_of(engine)
    with pytest.raises(ValueError, match=name):
        engine.load_checkpoint(str(tmp_path / "ckpt"))
    assert not marker.exists()
    assert_equal_states(before, state_of(engine))


def test_another_base_or_adapter_is_refused(checkpoints, tmp_path):
    engine = start(checkpoints)
    train_step(engine, sequences())
    path = str(tmp_path / "ckpt")
    engine.save_checkpoint(path)
    other_base = make_engine(checkpoints["llama", BF16], dtype="bf16")
    with pytest.raises(ValueError, match=f"base_digest {engine.base_digest()} differs.*{other_base.base_digest()}"):
        other_base.load_checkpoint(path)
    other_blocks = start(checkpoints, block_size=8)
    with pytest.raises(ValueError, match='"oft_block_size": 16.*differs.*"oft_block_size": 8'):
        other_blocks.load_checkpoint(path)
    started = start(checkpoints, init_path=f"{path}/adapter", reference="init")
    with pytest.raises(ValueError, match="reference_digest None differs"):
        started.load_checkpoint(path)
    with pytest.raises(ValueError, match="no state.json"):
        engine.load_checkpoint(str(tmp_path / "nowhere"))


def test_missing_contents_are_refused(checkpoints, tmp_path):
    engine = start(checkpoints)
    train_step(engine, sequences())
    engine.save_checkpoint(str(tmp_path / "ckpt"))
    (tmp_path / "ckpt" / "optimizer.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds no \['optimizer'\]"):
        engine.load_checkpoint(str(tmp_path / "ckpt"))
    with pytest.raises(ValueError, match="hdfs_path='hdfs://x'"):
        engine.save_checkpoint(str(tmp_path / "ckpt"), hdfs_path="hdfs://x")


def test_a_failed_save_leaves_the_older_checkpoint(checkpoints, tmp_path):
    engine = start(checkpoints)
    path = tmp_path / "ckpt"
    engine.save_checkpoint(str(path), global_step=1)
    train_step(engine, sequences())
    broken = checkpoint.TrainingState(
        adapter=engine.export_adapter(),
        optimizer=None,
        scheduler={"not": {"json"}},
        rng={},
        num_ranks=1,
        base_digest="",
        reference_digest=None,
        version=2,
        global_step=2,
    )
    with pytest.raises(TypeError):
        checkpoint.save(path, broken)
    assert checkpoint.load(path).global_step == 1
    engine.save_checkpoint(str(path), global_step=2)
    assert checkpoint.load(path).global_step == 2
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]


def test_random_number_states_come_back(checkpoints, tmp_path):
    engine = start(checkpoints)
    draw()
    engine.save_checkpoint(str(tmp_path / "ckpt"))
    drawn = draw()
    assert draw() != drawn
    engine.load_checkpoint(str(tmp_path / "ckpt"))
    assert draw() == drawn


def draw():
    """One number from each generator; the Gaussian ones keep a spare value in their state."""
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()]


def test_a_foreign_optimizer_state_changes_nothing(checkpoints):
    engine = start(checkpoints)
    train_step(engine, sequences())
    before = state_of(engine)
    tensors = dict(engine.optimizer.state_tensors())
    name = next(key for key in tensors if key.startswith("exp_avg/"))
    for broken in ({**tensors, "exp_avg/else": tensors[name]}, {k: t for k, t in tensors.items() if k != name}):
        with pytest.raises(ValueError, match="optimiser state does not fit"):
            engine.optimizer.load_state_tensors(broken)
    assert_equal_states(before, state_of(engine))
