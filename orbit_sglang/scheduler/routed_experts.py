"""This module keeps SGLang's record of routed experts on a CPU and across retractions.

The option ``--enable-return-routed-experts`` asks for it. SGLang writes the experts of every token beside the token's
place in the KV cache, whichever forward pass that was, and reads them there when the request ends. So a token found in
the prefix cache has the record of the pass that computed it, which is one of the same version
(``SlotScheduler.admit``).

A request that is retracted loses its places. Its tokens are computed again, maybe with another version, but their
log-probs were reported long before: the record that they had then is kept.
"""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.server_args import ServerArgs, get_global_server_args
from sglang.srt.state_capturer.routed_experts import RoutedExpertsCapturer, get_global_experts_capturer

from orbit_sglang.model.forward import most_tokens

_KEPT = "orbit_routed_experts"


def around_capturer(
    original: Callable, capturer: RoutedExpertsCapturer, model_config: Any, *, max_running_requests: int, **kwargs: Any
) -> None:
    """Makes room for a whole batch where prompts are not taken in chunks.

    It runs around ``RoutedExpertsCapturer.__init__``. SGLang 0.5.12 sizes its buffer by ``chunked_prefill_size``, which
    is -1 then (``state_capturer/routed_experts.py::RoutedExpertsCapturer.__init__``).

    Raises:
        ValueError: the model has no experts.
    """
    server_args = get_global_server_args()
    if getattr(model_config.hf_text_config, "num_experts_per_tok", None) is None:
        raise ValueError(
            f"--enable-return-routed-experts: {server_args.model_path} is dense, it has no experts to record; leave it out"
        )
    if (server_args.chunked_prefill_size or -1) < 0:
        max_running_requests = max(max_running_requests, most_tokens(server_args, model_config.context_len))
    original(capturer, model_config, max_running_requests=max_running_requests, **kwargs)


def before_release(batch: ScheduleBatch, idx: int, *args: Any, **kwargs: Any) -> None:
    """Keeps the record of a request that is retracted; runs before ``ScheduleBatch.release_req``."""
    req, capturer = batch.reqs[idx], get_global_experts_capturer()
    if _is_in_use() and req.return_routed_experts and capturer is not None:
        record = capturer.get_topk(req.req_pool_idx, req.seqlen, batch.req_to_token_pool)
        setattr(req, _KEPT, _with_kept(record, req, start=0))


def after_collect(result: None, scheduler: Scheduler, req: Req) -> None:
    """Gives tokens the record that they had before a retraction.

    It runs after ``Scheduler.maybe_collect_routed_experts``.
    """
    if _is_in_use() and req.routed_experts is not None:
        req.routed_experts = _with_kept(req.routed_experts, req, req.routed_experts_start_len)


def around_stream_output(original: Callable, scheduler: Scheduler, reqs: list[Req], *args: Any, **kwargs: Any) -> None:
    """Lines the records of a step up with its requests; runs around ``Scheduler.stream_output_generation``.

    SGLang 0.5.12 leaves out the place of a request that did not ask for a record, and then fails at the last of a batch
    (``tokenizer_manager.py::TokenizerManager._handle_batch_output``). One that asks and has none keeps its place.
    """
    silent = [req for req in reqs if not req.return_routed_experts]
    if not _is_in_use() or len(silent) == len(reqs):
        silent = []
    for req in silent:
        req.return_routed_experts = True
    try:
        original(scheduler, reqs, *args, **kwargs)
    finally:
        for req in silent:
            req.return_routed_experts = False


def _with_kept(record: torch.Tensor, req: Req, start: int) -> torch.Tensor:
    """Returns the record of a request from token ``start`` on, its first rows replaced by those that were kept."""
    kept = getattr(req, _KEPT, record[:0])[start:]
    return torch.cat([kept, record[len(kept) :]])


def _is_in_use() -> bool:
    server_args: ServerArgs = get_global_server_args()
    return server_args.enable_orbit_slots
