"""This module refuses requests that would end the scheduler, or be answered with nonsense, for their parameters alone.

SGLang 0.5.12 uses them as indices and probabilities without a look
(``managers/tokenizer_manager.py::TokenizerManager._validate_one_request``), and an error in the scheduler ends the server.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

_NUMBERS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
# A request's name for what the scheduler reads with the tokeniser, and SGLang's for it.
_NEED_TOKENIZER = {"stop": "stop_strs", "stop_regex": "stop_regex_strs", "min_new_tokens": "min_new_tokens"}


def after_create_tokenized_object(result: Any, tokenizer_manager: TokenizerManager, *args: Any, **kwargs: Any) -> Any:
    """Checks a request before it is sent; runs after ``TokenizerManager._create_tokenized_object``.

    Raises:
        ValueError: a number is out of range, or the request needs a tokeniser that the server lacks; SGLang answers it with 400.
    """
    if tokenizer_manager.server_args.enable_orbit_slots and isinstance(result, TokenizedGenerateReqInput):
        vocab_size = tokenizer_manager.model_config.vocab_size
        problems = itertools.chain(
            _problems(result, vocab_size),
            _without_tokenizer(result) if tokenizer_manager.server_args.skip_tokenizer_init else (),
        )
        problem = next(problems, None)
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


def _without_tokenizer(request: TokenizedGenerateReqInput) -> Iterator[str]:
    for name, attribute in _NEED_TOKENIZER.items():
        value = getattr(request.sampling_params, attribute)
        if value:
            yield (
                f"{name} {value!r}: the server has no tokeniser (--skip-tokenizer-init); send stop_token_ids, or start it "
                "with its tokeniser"
            )


def _is_index(value: Any, size: int) -> bool:
    return isinstance(value, int) and 0 <= value < size
