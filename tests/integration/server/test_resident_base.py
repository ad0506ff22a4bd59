"""A weight that changes while a server runs is noticed at the next staging (SGLang's model in this process)."""

import time

import pytest
import torch

from orbit_kernels.contract.errors import ErrorCode
from orbit_sglang.control.messages import StageRequest
from orbit_sglang.scheduler.staging import StageJob, StageOutcome
from tests.support import in_process
from tests.support.adapters import random_adapter

PROMPT = [5, 9, 13, 17]


@pytest.fixture(scope="module")
def served(checkpoints):
    with in_process.served(checkpoints.plain("qwen3"), dtype="float32") as running:
        yield running


@pytest.fixture
def stage(served, tmp_path):
    payload = tmp_path / "payload"
    payload.write_bytes(random_adapter(1).encode())

    def run() -> StageOutcome:
        runner = served.runner
        job = StageJob(StageRequest(version=1, path=str(payload)), runner.orbit_slots, runner.orbit_resident, slot=1)
        job.start()
        while not job.done:
            time.sleep(0.01)
        return job.outcome

    return run


def test_a_base_that_only_served_is_what_was_loaded(served, stage):
    served.greedy(PROMPT, 4)
    assert stage().failure is None
    served.greedy(PROMPT, 4, slot=1)
    assert served.runner.orbit_resident.changed() == []


def test_every_changed_tensor_is_named_and_no_slot_is_written(served, stage):
    parameters = dict(served.model.named_parameters())
    assert len(parameters) > 20
    for name, parameter in parameters.items():
        last = parameter.data.view(torch.int32).reshape(-1)[-1:]
        last ^= 1  # the lowest bit of the last value
        try:
            assert name in served.runner.orbit_resident.changed()
        finally:
            last ^= 1
    first = next(iter(parameters.values())).data
    first[[0, 1]] = first[[1, 0]]  # the same words in another order
    try:
        outcome = stage()
    finally:
        first[[0, 1]] = first[[1, 0]]
    assert outcome.failure.code is ErrorCode.BASE_CHANGED and not outcome.overwritten
    assert next(iter(parameters)) in outcome.failure.problems
    assert "start the server again" in outcome.failure.message
    assert stage().failure is None
