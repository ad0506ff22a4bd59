"""This module refuses requests that would end the scheduler, or be answered with nonsense, for their numbers alone.

SGLang 0.5.12 uses them as indices and probabilities without a look
(``managers/tokenizer_manager.py::TokenizerManager._validate_one_request``), and an error in the scheduler ends the server.
"""

import math
from collections.abc import Iterator
from typing import Any

from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

_NUMBERS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")


def after_create_tokenized_object(result: Any, tokenizer_manager: TokenizerManager, *args: Any, **kwargs: Any) -> Any:
    """Checks a request before it is sent; runs after ``TokenizerManager._create_tokenized_object``.

    Raises:
        ValueError: a number is out of range; SGLang answers it with 400.
    """
    if tokenizer_manager.server_args.enable_orbit_slots and isinstance(result, TokenizedGenerateReqInput):
        vocab_size = tokenizer_manager.model_config.vocab_size
        problem = next(_problems(result, vocab_size), None)
        if problem is not None:
            raise ValueError(problem)
    return result


def _problems(request: TokenizedGenerateReqInput, vocab_size: int) -> Iterator[str]:
    for name, tokens in (("input_ids", request.input_ids), ("token_ids_logprob", request.token_ids_logprob)):
        wrong = next((token for token in tokens or [] if not _is_index(token, vocab_size)), None)
        if wrong is not None:
            yield f"{name} {wrong!r}: must be integers from 0 to {vocab_size - 1}, the model's vocabulary"
    if not _is_index(request.top_logprobs_num or 0, vocab_size + 1):
        yield f"top_logprobs_num {request.top_logprobs_num!r}: must be an integer from 0 to {vocab_size}"
    for name in _NUMBERS:
        value = getattr(request.sampling_params, name)
        if not math.isfinite(value):
            yield f"{name} {value!r}: must be finite"


def _is_index(value: Any, size: int) -> bool:
    return isinstance(value, int) and 0 <= value < size
