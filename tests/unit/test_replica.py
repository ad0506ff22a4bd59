"""Replies that must not be trained on."""

import base64

import pytest
import torch

from orbit_verl.rollout.replica import RejectedSample, check_record, check_reply, decode_record


def reply(num_tokens: int, num_log_probs: int | None, finish: str = "stop") -> dict:
    meta_info = {"finish_reason": {"type": finish, "message": "server is shutting down"}}
    if num_log_probs is not None:
        meta_info["output_token_logprobs"] = [(-0.5, token, None) for token in range(num_log_probs)]
    return {"output_ids": list(range(num_tokens)), "meta_info": meta_info}


def test_whole_replies_pass():
    check_reply("r", reply(4, 4), expects_log_probs=True)
    check_reply("r", reply(4, None), expects_log_probs=False)
    certain = reply(2, 2)
    certain["meta_info"]["output_token_logprobs"] = [(0.0, 0, None), (1e-7, 1, None)]
    check_reply("r", certain, expects_log_probs=True)


@pytest.mark.parametrize("log_prob", (None, float("nan"), float("-inf"), float("inf"), 0.5, "-0.5"))
def test_a_log_prob_that_is_none_is_rejected(log_prob):
    answer = reply(4, 4)
    answer["meta_info"]["output_token_logprobs"][2] = (log_prob, 2, None)
    message = f"request r7: the log-prob of token 2 \\(2\\) is {log_prob}, must be a finite number, at most 0"
    with pytest.raises(RejectedSample, match=message):
        check_reply("r7", answer, expects_log_probs=True)


def test_the_log_prob_of_another_token_is_rejected():
    answer = reply(4, 4)
    answer["meta_info"]["output_token_logprobs"][1] = (-0.5, 9, None)
    with pytest.raises(RejectedSample, match="request r7: token 1 is 1, its log-prob that of 9"):
        check_reply("r7", answer, expects_log_probs=True)


def test_a_log_prob_too_few_is_rejected():
    """Five tokens, four log-probs. docs/field-cases.md: missing log-probs."""
    with pytest.raises(RejectedSample, match="5 tokens with 4 log-probs"):
        check_reply("r", reply(5, 4), expects_log_probs=True)
    with pytest.raises(RejectedSample, match="5 tokens with 0 log-probs"):
        check_reply("r", reply(5, None), expects_log_probs=True)


def test_aborted_replies_are_rejected():
    with pytest.raises(RejectedSample, match="request r: the server aborted it.*shutting down"):
        check_reply("r", reply(5, 5, finish="abort"), expects_log_probs=True)


def test_a_record_is_read_as_sglang_sends_it():
    ids = torch.arange(2 * 3 * 2, dtype=torch.int32).reshape(2, 3, 2) + 300
    record = decode_record(base64.b64encode(ids.numpy().tobytes()).decode(), num_layers=3, top_k=2)
    assert record.dtype == torch.int16 and torch.equal(record.int(), ids)


def test_a_record_that_does_not_pair_with_the_tokens_is_rejected():
    """As many rows as positions; the last token has not been through the model.

    docs/field-cases.md: a route for each position.
    """
    answer = reply(4, 4)
    with pytest.raises(RejectedSample, match="7 tokens with experts recorded for 0 of them: must be all but the last"):
        check_record(answer, prompt_length=3)
    for rows in (5, 6, 7):
        answer["meta_info"]["routed_experts"] = torch.zeros(rows, 2, 2, dtype=torch.int16)
        if rows == 6:
            check_record(answer, prompt_length=3)
            continue
        with pytest.raises(RejectedSample, match=f"7 tokens with experts recorded for {rows} of them"):
            check_record(answer, prompt_length=3)
