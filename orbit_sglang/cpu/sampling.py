"""This module is SGLang's seeded sampling in plain torch, as SGLang's own hash is a Triton kernel.

Dimension suffixes: R requests, V vocabulary.
"""

import torch

_MASK32 = 0xFFFFFFFF


def multinomial_with_seed(logprobs_RV: torch.Tensor, seed_R: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
    """Samples one token a row by the Gumbel-max trick; the noise depends on seed, position and token only.

    On a CPU it replaces SGLang's function of the same name, which needs Triton
    (``layers/sampler.py::multinomial_with_seed``).

    Args:
        logprobs_RV: log-probabilities, in nats.
        seed_R: int64 seeds.
        positions_R: position of the token that is sampled.

    Returns:
        Token indices [R, 1].
    """
    columns_V = torch.arange(logprobs_RV.shape[1])
    uniform_RV = murmur_hash32(seed_R, positions_R, columns_V).double() / _MASK32
    gumbel_RV = -(-uniform_RV.log().clamp(min=torch.finfo(torch.float64).min)).log()
    return (gumbel_RV + logprobs_RV.double()).argmax(dim=1, keepdim=True)


def murmur_hash32(seed_R: torch.Tensor, positions_R: torch.Tensor, columns_V: torch.Tensor) -> torch.Tensor:
    """Returns MurmurHash3 (x86, 32 bit, seed 0) of seed low, seed high, position and column: [R, V] in int64.

    Each of the four is one word. Products wrap in int64, whose low 32 bits are those of the unsigned product.
    """
    hash_R = torch.zeros_like(seed_R)
    for word_R in (seed_R & _MASK32, seed_R >> 32 & _MASK32, positions_R.to(torch.int64)):
        hash_R = _mix(hash_R, word_R)
    hash_RV = _mix(hash_R[:, None], columns_V[None, :]) ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hash_RV = (hash_RV ^ hash_RV >> shift) * factor & _MASK32
    return hash_RV ^ hash_RV >> 16


def _mix(state: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    word = _rotate_left(word * 0xCC9E2D51 & _MASK32, 15) * 0x1B873593 & _MASK32
    return _rotate_left(state ^ word, 13) * 5 + 0xE6546B64 & _MASK32


def _rotate_left(word: torch.Tensor, bits: int) -> torch.Tensor:
    return (word << bits | word >> 32 - bits) & _MASK32
