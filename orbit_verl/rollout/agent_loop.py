"""This module gives every sample of verl's agent loops a seed, so that a run can be repeated token by token."""

import collections
import hashlib
from collections.abc import Hashable, Sequence
from typing import Any

import ray
import torch
from tensordict import TensorDict
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils import tensordict_utils as tu

REPEAT_KEY = "orbit_repeat"


def sample_seed(run_seed: int, step: int, prompt: Any, repeat: int, session: int) -> int:
    """Returns one sample's seed below 2**31, the same in every run that submits the same prompts at the same step.

    Args:
        run_seed: ``orbit.seed``.
        step: at which the prompt was submitted.
        prompt: the conversation.
        repeat: equal prompts that were submitted before at that step.
        session: number of the sample among those of its prompt.
    """
    digest = hashlib.sha256(f"{run_seed}/{step}/{prompt}/{repeat}/{session}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


class Repeats:
    """``Repeats`` number equal prompts of one step, which verl may submit in one batch or one after the other."""

    def __init__(self):
        self._step: Hashable = None
        self._seen: collections.Counter[str] = collections.Counter()

    def number(self, step: Hashable, prompts: Sequence[Any]) -> list[int]:
        """Returns for each prompt how many equal ones of the step came before it."""
        if step != self._step:
            self._step, self._seen = step, collections.Counter()
        numbers = []
        for prompt in map(str, prompts):
            numbers.append(self._seen[prompt])
            self._seen[prompt] += 1
        return numbers


class OrbitAgentLoopWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    """An `OrbitAgentLoopWorker` is verl's worker whose ``orbit.seed`` reaches the server as ``sampling_seed``."""

    async def _run_agent_loop(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], *, session_id: int, **prompt
    ):
        repeat, conversation = int(prompt.pop(REPEAT_KEY)), list(prompt["raw_prompt"])
        seed = sample_seed(self.config.orbit.seed, trajectory["step"], conversation, repeat, session_id)
        seeded = {**sampling_params, "sampling_seed": seed}
        return await super()._run_agent_loop(seeded, trajectory, session_id=session_id, **prompt)


class OrbitAgentLoopManager(AgentLoopManagerTQ):
    """An `OrbitAgentLoopManager` is verl's with ``OrbitAgentLoopWorker``; it is in use when ``orbit.seed`` is set.

    It sees all prompts of a run, whichever worker gets them.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(OrbitAgentLoopWorker)
        self._repeats = {False: Repeats(), True: Repeats()}

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Hands prompts to the workers, each with its number among equal ones; it does not wait for their samples."""
        repeats = self._repeats[bool(tu.get(prompts, "validate", False))]
        numbers = repeats.number(tu.get(prompts, "global_steps"), tu.get(prompts, "raw_prompt"))
        prompts[REPEAT_KEY] = torch.tensor(numbers)
        super().generate_sequences(prompts)
