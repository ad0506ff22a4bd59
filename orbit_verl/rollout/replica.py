"""verl's SGLang replica gets slots: samples have version spans, the base stays resident, aborted samples drop out."""

import base64
import math
from typing import Any

import numpy as np
import ray
import torch
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer, SGLangReplica

from orbit_kernels.contract.keys import VERSIONS_KEY
from orbit_kernels.contract.options import ENABLE_FLAG
from orbit_kernels.contract.versions import steps_of, version_of
from orbit_verl.upstream.imports import Process, require_applied
from orbit_verl.upstream.methods import GENERATE_REQUEST

RECORD_KEY = "routed_experts"
LARGEST_LOG_PROB = 1e-5
"""This is what rounding may make of a probability of one, in nats."""


class RejectedSample(RuntimeError):
    """A `RejectedSample` is a reply that must not be trained on.

    verl counts its session as failed, and replaces a group of which none is left.
    """


class OrbitHttpServer(SGLangHttpServer):
    """An `OrbitHttpServer` is the Ray actor that runs an SGLang server with slots."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._replies: dict[str, dict[str, Any] | None] = {}
        self._kv_cache_released = False

    async def launch_server(self, master_address: str | None = None, master_port: int | None = None):
        """Loads SGLang's plugins, then starts the server: verl builds ServerArgs before SGLang would load them."""
        require_applied(Process.ROLLOUT)
        load_plugins()
        if ENABLE_FLAG not in ServerArgs.__dataclass_fields__:
            raise RuntimeError("SGLang did not load Orbit's server plugin: `orbit doctor` says why")
        await super().launch_server(master_address, master_port)
        self._keep_replies()

    def _keep_replies(self) -> None:
        """Keeps each reply until ``generate`` has read it: verl passes on neither versions nor an abort's reason."""

        async def generate_request(request, *args, **kwargs):
            async for reply in upstream(request, *args, **kwargs):
                if isinstance(request.rid, str) and request.rid in self._replies:
                    # Before verl reads it, who makes numbers of what may be none.
                    check_reply(request.rid, reply, request.return_logprob)
                    self._decode_record(reply["meta_info"])
                    self._replies[request.rid] = reply
                yield reply

        upstream = GENERATE_REQUEST.replace_on(self.tokenizer_manager, generate_request)

    def _decode_record(self, meta_info: dict[str, Any]) -> None:
        """Decodes the experts that the server recorded, as verl expects them.

        verl 0.9.1 asks for a tensor (``async_sglang_server.py::SGLangHttpServer.generate``), SGLang 0.5.12 gives base64
        (``tokenizer_manager.py::TokenizerManager._handle_batch_output``).
        """
        if isinstance(meta_info.get(RECORD_KEY), str):
            config = self.model_config.hf_config.get_text_config()
            meta_info[RECORD_KEY] = decode_record(
                meta_info[RECORD_KEY], config.num_hidden_layers, config.num_experts_per_tok
            )

    async def generate(self, prompt_ids, sampling_params: dict[str, Any], request_id: str, **kwargs) -> TokenOutput:
        """Generates, and reports the adapter version of every token.

        Raises:
            RejectedSample: aborted, tokens, log-probs and recorded experts do not match one to one, or a log-prob is none.
        """
        self._replies[request_id] = None
        try:
            output = await super().generate(prompt_ids, sampling_params, request_id, **kwargs)
        finally:
            reply = self._replies.pop(request_id)
        if reply is None:
            raise RejectedSample(f"request {request_id}: the server ended it without a reply")
        if self.config.enable_rollout_routing_replay:
            check_record(reply, len(prompt_ids))
        spans = reply["meta_info"][VERSIONS_KEY]
        versions = [version for version, _, _ in spans] or [version_of(self.global_steps)]
        output.extra_fields.update(
            {
                VERSIONS_KEY: spans,
                "min_global_steps": steps_of(min(versions)),
                "max_global_steps": steps_of(max(versions)),
            }
        )
        return output

    async def release_kv_cache(self):
        """Frees the KV cache until ``resume_kv_cache``."""
        if not self._kv_cache_released:
            await super().release_kv_cache()
            self._kv_cache_released = True

    async def resume_kv_cache(self):
        """Takes the KV cache back if it was freed.

        verl asks for it at every sync, and SGLang ends at one that it has
        (``scheduler_update_weights_mixin.py::SchedulerUpdateWeightsMixin.resume_memory_occupation``).
        """
        if self._kv_cache_released:
            await super().resume_kv_cache()
            self._kv_cache_released = False

    async def sleep(self):
        """Frees the KV cache; the frozen base stays."""
        await self.release_kv_cache()

    async def wake_up(self):
        """Takes the KV cache back."""
        await self.resume_kv_cache()


def check_reply(request_id: str, reply: dict[str, Any], expects_log_probs: bool) -> None:
    """Refuses a reply that was cut short or whose log-probs are not those of its tokens.

    Raises:
        RejectedSample: with the request and the reason.
    """
    meta_info = reply["meta_info"]
    finish_reason = (meta_info.get("finish_reason") or {}).get("type")
    if finish_reason == "abort":
        raise RejectedSample(
            f"request {request_id}: the server aborted it: {meta_info['finish_reason'].get('message', 'no reason given')}"
        )
    tokens, log_probs = reply["output_ids"], meta_info.get("output_token_logprobs") or []
    if not expects_log_probs or not tokens:
        return
    if len(log_probs) != len(tokens):
        raise RejectedSample(
            f"request {request_id}: {len(tokens)} tokens with {len(log_probs)} log-probs: they cannot be paired"
        )
    for place, (token, (log_prob, of_token, *_)) in enumerate(zip(tokens, log_probs, strict=True)):
        if of_token != token:
            raise RejectedSample(f"request {request_id}: token {place} is {token}, its log-prob that of {of_token}")
        if not isinstance(log_prob, int | float) or not math.isfinite(log_prob) or log_prob > LARGEST_LOG_PROB:
            raise RejectedSample(
                f"request {request_id}: the log-prob of token {place} ({token}) is {log_prob}, must be a finite number, at most 0"
            )


def decode_record(encoded: str, num_layers: int, top_k: int) -> torch.Tensor:
    """Decodes SGLang's record of a request to int16 [tokens, layers, experts of a token]."""
    ids = np.frombuffer(base64.b64decode(encoded), dtype=np.int32).reshape(-1, num_layers, top_k)
    return torch.from_numpy(ids.astype(np.int16))


def check_record(reply: dict[str, Any], prompt_length: int) -> None:
    """Refuses a reply whose record of experts does not pair with its tokens: all but the last went through the model.

    Raises:
        RejectedSample: with the reason.
    """
    record = reply["meta_info"].get(RECORD_KEY)
    rows, num_tokens = 0 if record is None else len(record), prompt_length + len(reply["output_ids"])
    if rows != num_tokens - 1:
        raise RejectedSample(f"{num_tokens} tokens with experts recorded for {rows} of them: must be all but the last")


class OrbitReplica(SGLangReplica):
    """An `OrbitReplica` is a replica whose server has adapter slots."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if not (self.is_reward_model or self.is_teacher_model):
            self.server_class = ray.remote(OrbitHttpServer)
