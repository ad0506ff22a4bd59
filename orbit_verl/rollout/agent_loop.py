"""This module gives every sample of verl's agent loops a seed, so that a run can be repeated token by token."""

import hashlib
from typing import Any

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ


def sample_seed(run_seed: int, step: int, prompt: Any, session: int) -> int:
    """Returns one sample's seed below 2**31, the same in every run that submits the same prompt at the same step."""
    digest = hashlib.sha256(f"{run_seed}/{step}/{prompt}/{session}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


class OrbitAgentLoopWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    """An `OrbitAgentLoopWorker` is verl's worker whose ``orbit.seed`` reaches the server as ``sampling_seed``."""

    async def _run_agent_loop(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], *, session_id: int, **prompt
    ):
        seed = sample_seed(self.config.orbit.seed, trajectory["step"], list(prompt["raw_prompt"]), session_id)
        seeded = {**sampling_params, "sampling_seed": seed}
        return await super()._run_agent_loop(seeded, trajectory, session_id=session_id, **prompt)


class OrbitAgentLoopManager(AgentLoopManagerTQ):
    """An `OrbitAgentLoopManager` is verl's with ``OrbitAgentLoopWorker``; it is in use when ``orbit.seed`` is set."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(OrbitAgentLoopWorker)
