"""A served model in this process: SGLang's ModelRunner with the slots, without scheduler and HTTP.

It starts in a second, so every format can be looked into and compared; the tests with real servers cover the rest.
"""

import contextlib
import pathlib
from collections.abc import Iterator

import torch
from sglang.bench_one_batch import decode, extend
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import destroy_distributed_environment, destroy_model_parallel
from sglang.srt.eplb import expert_location
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer, set_global_experts_capturer

from orbit_kernels.contract.payload import Adapter
from orbit_sglang import plugin
from orbit_sglang.control.slots import BASE_SLOT
from orbit_sglang.scheduler.slot_scheduler import RequestVersion
from tests.support.server import free_port

OPTIONS = {
    "device": "cpu", "attention_backend": "torch_native", "enable_orbit_slots": True,
    "max_total_tokens": 2000, "max_running_requests": 4, "mem_fraction_static": 0.9,
}  # fmt: skip
ADAPTED_SLOT = 1


class Served:
    """A running model; ``experts`` are those recorded by the last answer, one [tokens - 1, layers, top_k] a request."""

    def __init__(self, runner: ModelRunner):
        self.runner = runner
        self.experts: list[torch.Tensor] = []
        self.model = runner.model

    def stage(self, adapter: Adapter, slot: int = ADAPTED_SLOT) -> None:
        """Place an adapter in a slot."""
        self.runner.orbit_slots.prepare(adapter.encode()).write(slot)

    def greedy(self, prompt: list[int], num_tokens: int, slot: int = BASE_SLOT) -> tuple[list[int], torch.Tensor]:
        """Tokens, and the log-probs of the whole vocabulary for each of them [num_tokens, V], computed step by step."""
        (answer,) = self.together([prompt], [slot], num_tokens)
        return answer

    def together(
        self, prompts: list[list[int]], slots: list[int], num_tokens: int
    ) -> list[tuple[list[int], torch.Tensor]]:
        """What ``greedy`` answers to each prompt in its slot, from one batch."""
        reqs = [_request(str(rid), *one, num_tokens) for rid, one in enumerate(zip(prompts, slots, strict=True))]
        next_R, logits_RV, batch = extend(reqs, self.runner)
        tokens, logits = [next_R], [logits_RV]
        while len(tokens) < num_tokens:
            next_R, logits_RV = decode(tokens[-1], batch, self.runner)
            tokens.append(next_R)
            logits.append(logits_RV)
        if (capturer := get_global_experts_capturer()) is not None:
            pool = self.runner.req_to_token_pool
            self.experts = [
                capturer.get_topk(req.req_pool_idx, len(req.origin_input_ids) + num_tokens, pool) for req in reqs
            ]
        self.runner.req_to_token_pool.clear()
        self.runner.token_to_kv_pool_allocator.clear()
        logprobs_RTV = torch.stack(logits, dim=1).float().log_softmax(-1)
        return list(zip(torch.stack(tokens, dim=1).tolist(), logprobs_RTV, strict=True))


def _request(rid: str, prompt: list[int], slot: int, num_tokens: int) -> Req:
    req = Req(rid, "", prompt, SamplingParams(temperature=0, max_new_tokens=num_tokens))
    req.fill_ids, req.logprob_start_len = req.origin_input_ids, -1
    req.set_extend_input_len(len(prompt))
    req.orbit = RequestVersion(version=slot, slot=slot, chosen=True, base_key=None)
    return req


@contextlib.contextmanager
def served(folder: pathlib.Path, **options) -> Iterator[Served]:
    """A checkpoint as a server with slots loads it; ``options`` are fields of ServerArgs."""
    default_dtype = torch.get_default_dtype()
    plugin.register()
    server_args = ServerArgs(model_path=str(folder), **{**OPTIONS, **options})
    set_global_server_args_for_scheduler(server_args)
    config = ModelConfig.from_server_args(server_args)
    ranks = {"gpu_id": 0, "tp_rank": 0, "tp_size": 1, "moe_ep_rank": 0, "moe_ep_size": 1, "pp_rank": 0, "pp_size": 1}
    try:
        runner = ModelRunner(
            model_config=config,
            mem_fraction_static=server_args.mem_fraction_static,
            nccl_port=free_port(),
            server_args=server_args,
            **ranks,
        )
        yield Served(runner)
    finally:
        torch.set_default_dtype(default_dtype)  # SGLang does not when loading fails
        destroy_model_parallel()
        destroy_distributed_environment()
        # A process serves one model, so SGLang sets this once and offers no way back (eplb/expert_location.py:315).
        expert_location._global_expert_location_metadata = None
        set_global_experts_capturer(None)
