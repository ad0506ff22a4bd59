"""Replies that must not be trained on."""

import pytest

from orbit_verl.replica import RejectedSample, check_reply


def reply(num_tokens: int, num_log_probs: int | None, finish: str = "stop") -> dict:
    meta_info = {"finish_reason": {"type": finish, "message": "server is shutting down"}}
    if num_log_probs is not None:
        meta_info["output_token_logprobs"] = [(-0.5, token, None) for token in range(num_log_probs)]
    return {"output_ids": list(range(num_tokens)), "meta_info": meta_info}


def test_whole_replies_pass():
    check_reply(reply(4, 4), expects_log_probs=True)
    check_reply(reply(4, None), expects_log_probs=False)


def test_a_log_prob_too_few_is_rejected():
    """field-cases #34: five tokens, four log-probs."""
    with pytest.raises(RejectedSample, match="5 tokens with 4 log-probs"):
        check_reply(reply(5, 4), expects_log_probs=True)
    with pytest.raises(RejectedSample, match="5 tokens with 0 log-probs"):
        check_reply(reply(5, None), expects_log_probs=True)


def test_aborted_replies_are_rejected():
    with pytest.raises(RejectedSample, match="aborted.*shutting down"):
        check_reply(reply(5, 5, finish="abort"), expects_log_probs=True)


def test_no_reply_is_rejected():
    with pytest.raises(RejectedSample, match="without a reply"):
        check_reply(None, expects_log_probs=True)
