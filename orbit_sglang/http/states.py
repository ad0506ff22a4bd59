"""This module drops the states of requests that have ended, so that a server that is told to end does not wait for them.

SGLang 0.5.12 keeps a state of every request until its last tokens arrive. One that is refused before it reaches the
scheduler, or aborted in the waiting queue, has none, and a server waits for its end after SIGTERM
(``tokenizer_manager.py::TokenizerManager.sigterm_watchdog``).
"""

import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

from sglang.srt.managers.tokenizer_manager import TokenizerManager


async def around_generate(
    original: Callable, tokenizer_manager: TokenizerManager, obj: Any, request: Any = None
) -> AsyncGenerator[dict, None]:
    """Drops what was refused before the scheduler got it; runs around ``TokenizerManager.generate_request``."""
    try:
        async with contextlib.aclosing(original(tokenizer_manager, obj, request)) as answers:
            async for answer in answers:
                yield answer
    finally:
        _drop_unsent(tokenizer_manager, obj)


def around_abort(original: Callable, tokenizer_manager: TokenizerManager, recv_obj: Any) -> None:
    """Drops what was aborted before it ran; runs around ``TokenizerManager._handle_abort_req``."""
    if recv_obj.rid in tokenizer_manager.rid_to_state:
        original(tokenizer_manager, recv_obj)
        tokenizer_manager.rid_to_state.pop(recv_obj.rid, None)


def _drop_unsent(tokenizer_manager: TokenizerManager, obj: Any) -> None:
    """Drops a request's states, or those of a batch, that the scheduler knows nothing of."""
    is_sampled = getattr(obj, "parallel_sample_num", 1) > 1  # the samples are sent, by ids of their own
    rids = obj.rid if isinstance(obj.rid, list) else [obj.rid]
    own = {id(one) for one in (obj, *obj.__dict__.get("_sub_obj_cache", {}).values())}
    for rid in rids:
        state = tokenizer_manager.rid_to_state.get(rid)
        # Another request may have the same id, which is why this one was refused.
        if state is not None and id(state.obj) in own and (is_sampled or not state.time_stats.api_server_dispatch_time):
            del tokenizer_manager.rid_to_state[rid]
