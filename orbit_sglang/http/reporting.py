"""This module puts the versions of the tokens into every answer.

They are ``meta_info.orbit_versions``, and ``metadata.orbit_versions`` for OpenAI routes.
"""

import json
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from sglang.srt.managers.tokenizer_manager import TokenizerManager

from orbit_kernels.contract.keys import VERSIONS_KEY
from orbit_sglang.control.messages import INFO_KEY

_ENDS_A_CHOICE = '"finish_reason":"'


def extend_spans(spans: list[list[int]], versions: Iterable[int]) -> None:
    """Appends one version per token to spans ``[[version, first_token, count], ...]``, in place."""
    for version in versions:
        if spans and spans[-1][0] == version:
            spans[-1][2] += 1
        else:
            first_token = spans[-1][1] + spans[-1][2] if spans else 0
            spans.append([version, first_token, 1])


def before_batch_output(tokenizer_manager: TokenizerManager, recv_obj: Any) -> None:
    """Replaces a step's versions by the request's spans so far.

    It runs before ``TokenizerManager._handle_batch_output``. SGLang 0.5.12 reports only the last chunk of
    ``customized_info`` (``tokenizer_manager.py::TokenizerManager._handle_batch_output``), so the versions of earlier
    chunks are kept on the request's state.
    """
    info = getattr(recv_obj, "customized_info", None)
    if not info or INFO_KEY not in info:
        return
    spans_per_request = []
    for rid, versions in zip(recv_obj.rids, info.pop(INFO_KEY), strict=True):
        state = tokenizer_manager.rid_to_state.get(rid)
        spans = [] if state is None else state.__dict__.setdefault(VERSIONS_KEY, [])
        extend_spans(spans, versions)
        spans_per_request.append([span.copy() for span in spans])
    info[VERSIONS_KEY] = spans_per_request


def after_openai_response(result: Any, serving: Any, request: Any, ret: list[dict[str, Any]], created: int) -> None:
    """Adds one list of spans per choice; runs after ``_build_chat_response`` and ``_build_completion_response``."""
    versions = [item["meta_info"].get(VERSIONS_KEY) for item in ret]
    if any(versions) and getattr(result, "metadata", None) is not None:
        result.metadata[VERSIONS_KEY] = versions


def around_generate(original: Callable, tokenizer_manager: TokenizerManager, obj: Any, request: Any = None):
    """Lets a stream of an OpenAI route see the spans; runs around ``TokenizerManager.generate_request``."""
    stream = original(tokenizer_manager, obj, request)
    versions = getattr(obj, VERSIONS_KEY, None)
    return stream if versions is None else _noting_versions(stream, versions)


def around_openai_stream(original: Callable, serving: Any, adapted_request: Any, request: Any, raw_request: Any):
    """Puts a choice's spans on the chunk that ends it.

    It runs around ``OpenAIServingChat._generate_chat_stream`` and ``OpenAIServingCompletion._generate_completion_stream``.
    Clients of OpenAI expect a choice in every chunk, so there is none of its own for the spans.
    """
    stream = original(serving, adapted_request, request, raw_request)
    if not serving.tokenizer_manager.server_args.enable_orbit_slots:
        return stream
    return _with_versions(stream, adapted_request)


async def _noting_versions(stream: AsyncIterator[dict], versions: dict[int, Any]) -> AsyncIterator[dict]:
    async for content in stream:
        if VERSIONS_KEY in content["meta_info"]:
            versions[content.get("index", 0)] = content["meta_info"][VERSIONS_KEY]
        yield content


async def _with_versions(stream: AsyncIterator[str], adapted_request: Any) -> AsyncIterator[str]:
    versions: dict[int, Any] = {}
    setattr(adapted_request, VERSIONS_KEY, versions)
    async for event in stream:
        yield _with_metadata(event, versions) if _ENDS_A_CHOICE in event else event


def _with_metadata(event: str, versions: dict[int, Any]) -> str:
    chunk = json.loads(event.removeprefix("data: "))
    spans = [versions.get(choice["index"]) for choice in chunk["choices"]]
    if not any(spans):
        return event
    return f"data: {json.dumps({**chunk, 'metadata': {VERSIONS_KEY: spans}})}\n\n"
