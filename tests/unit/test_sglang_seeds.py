"""Seeded sampling: the hash by its published test vectors, the distribution, and independence of the batch."""

import pytest
import torch

from orbit_sglang.cpu.sampling import multinomial_with_seed, murmur_hash32

MASK = 0xFFFFFFFF


def murmur3_x86_32(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0 for whole words, in Python's integers."""
    state = 0
    for offset in range(0, len(data), 4):
        word = int.from_bytes(data[offset : offset + 4], "little") * 0xCC9E2D51 & MASK
        word = ((word << 15 | word >> 17) & MASK) * 0x1B873593 & MASK
        state ^= word
        state = ((state << 13 | state >> 19) & MASK) * 5 + 0xE6546B64 & MASK
    state ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        state = (state ^ state >> shift) * factor & MASK
    return state


def test_reference_hash_by_known_vectors():
    assert murmur3_x86_32(b"test") == 0xBA6BD213
    assert murmur3_x86_32(b"") == 0


@pytest.mark.parametrize("seed, position, column", [(0, 0, 0), (1, 2, 3), (2**31 - 1, 4096, 151935), (2**40 + 7, 1, 9)])
def test_hash_is_murmur3(seed, position, column):
    words = (seed & MASK, seed >> 32, position, column)
    expected = murmur3_x86_32(b"".join(word.to_bytes(4, "little") for word in words))
    got = murmur_hash32(torch.tensor([seed]), torch.tensor([position]), torch.tensor([column]))
    assert got.item() == expected


def test_a_row_does_not_depend_on_its_batch():
    torch.manual_seed(0)
    logprobs = torch.randn(8, 50).log_softmax(-1)
    seeds, positions = torch.arange(100, 108), torch.arange(8)
    together = multinomial_with_seed(logprobs, seeds, positions)
    alone = [multinomial_with_seed(logprobs[r : r + 1], seeds[r : r + 1], positions[r : r + 1]) for r in range(8)]
    assert torch.equal(together, torch.cat(alone))


def test_frequencies_follow_the_distribution():
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    num = 20000
    tokens = multinomial_with_seed(probs.log().expand(num, -1), torch.arange(num), torch.zeros(num, dtype=torch.int64))
    frequencies = torch.bincount(tokens.flatten(), minlength=4) / num
    # Five standard deviations of a binomial with p = 0.5 and 20,000 draws are 0.018.
    assert (frequencies - probs).abs().max() < 0.018
