import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from orbit_verl.model.attention import CausalAttention, as_served
from tests.support.engines import log_probs, make_engine, max_difference, randomise, sequences

LENGTHS, PROMPTS = (37, 21, 50, 21), (20, 5, 20, 0)
HEADS, KV_HEADS, WIDTH = 4, 2, 16


def inputs(dtype, seed=0):
    """Query, key and value of each sequence, [length, heads, width]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(length, heads, WIDTH) for length in LENGTHS for heads in (HEADS, KV_HEADS, KV_HEADS)]
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [tensors[index : index + 3] for index in range(0, len(tensors), 3)]


def attend(sequences, layout):
    """CausalAttention over the sequences, [length, heads * width] for each."""
    attention = CausalAttention(softmax_scale=None)
    if layout == "padded":
        out = attention(*(pad_sequence(tensors) for tensors in zip(*sequences, strict=True)), None)
        return [out[:length, index] for index, length in enumerate(LENGTHS)]
    ends = torch.tensor((0, *LENGTHS)).cumsum(0).int()
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_q_padded=ends)
    out = attention(*(torch.cat(tensors) for tensors in zip(*sequences, strict=True)), None, packed_seq_params=packed)
    return list(out.split(LENGTHS))


def served(query, key, value, prompt):
    """The server's own calls: one over the prompt, one for each decoded token."""
    q, k, v = (tensor.movedim(0, 1)[None] for tensor in (query, key, value))
    calls = [(0, prompt)] if prompt else []
    calls += [(position, position + 1) for position in range(prompt, len(query))]
    rows = [
        scaled_dot_product_attention(
            q[:, :, start:end], k[:, :, :end], v[:, :, :end], is_causal=end - start > 1, enable_gqa=True
        )
        for start, end in calls
    ]
    return torch.cat(rows, dim=2)[0].movedim(0, 1).flatten(1)


@pytest.mark.parametrize("layout", ("packed", "padded"))
def test_served_rows_are_the_servers_bit_for_bit(layout):
    sequences_qkv = inputs(torch.bfloat16)
    expected = [served(*qkv, prompt) for qkv, prompt in zip(sequences_qkv, PROMPTS, strict=True)]
    with as_served(PROMPTS):
        ours = attend(sequences_qkv, layout)
    assert max_difference(ours, expected) == 0
    plain = attend(sequences_qkv, layout)
    assert 0 < max_difference(plain, expected) < 0.05


@pytest.mark.parametrize("layout", ("packed", "padded"))
def test_gradient_is_that_of_causal_attention(layout):
    results = []
    for context in (lambda: as_served(PROMPTS), lambda: as_served((0,) * 4), None):
        qkv = inputs(torch.float32)
        leaves = [tensor.requires_grad_(True) for tensors in qkv for tensor in tensors]
        if context is None:
            expected = [served(*tensors, len(tensors[0])) for tensors in qkv]
            loss = sum((out**2).sum() for out in expected)
        else:
            with context():
                loss = sum((out**2).sum() for out in attend(qkv, layout))
        results.append(torch.autograd.grad(loss, leaves))
    for ours in results[:2]:
        for gradient, expected in zip(ours, results[2], strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)


def test_engine_gives_one_token_the_same_bits_in_every_batch(checkpoints):
    """Layout and neighbours do not matter, so that a log-prob does not depend on how the trainer forms its batches."""
    tokens = sequences()
    results = []
    for packed in (True, False):
        engine = make_engine(checkpoints["qwen3", torch.bfloat16], packed=packed, dtype="bf16")
        randomise(engine)
        results += [log_probs(engine, tokens, micro_batch=size) for size in (1, 2, 4)]
    assert [max_difference(results[0], result) for result in results[1:]] == [0] * 5
