"""This module is orthogonal fine-tuning (OFT) in plain torch: the specification of every faster kernel.

A linear ``y = x W^T`` becomes ``y = (x R) W^T`` with ``R`` block-diagonal and orthogonal. Each block is the Cayley
transform of a skew-symmetric matrix ``Q``, ``(I + Q)(I - Q)^-1``, exactly or as the truncated Neumann series that peft
uses. The source is Qiu et al., "Controlling Text-to-Image Diffusion by Orthogonal Finetuning" (arXiv:2306.07280); that
of the series is "Orthogonal Finetuning Made Scalable" (arXiv:2506.19847). Tensor layout and the counting of terms are
peft's (``peft.tuners.oft``), so a checkpoint moves between the two without conversion.

The dimension suffixes are: T tokens, D input width, N blocks (D / B), B block size, E free entries of a block,
B * (B - 1) / 2.
"""

import torch


def skew_symmetric(entries_NE: torch.Tensor, block_size: int) -> torch.Tensor:
    """Returns skew-symmetric blocks [N, B, B] from their strict upper triangles [N, E], row by row."""
    rows, cols = torch.triu_indices(block_size, block_size, 1, device=entries_NE.device)
    upper_NBB = entries_NE.new_zeros(entries_NE.shape[0], block_size, block_size)
    upper_NBB[:, rows, cols] = entries_NE
    return upper_NBB - upper_NBB.transpose(-2, -1)


def cayley(q_NBB: torch.Tensor) -> torch.Tensor:
    """Returns the exact Cayley transform of skew-symmetric blocks [N, B, B]; it is orthogonal to rounding."""
    eye_BB = torch.eye(q_NBB.shape[-1], dtype=q_NBB.dtype, device=q_NBB.device)
    return torch.linalg.solve(eye_BB + q_NBB, eye_BB - q_NBB, left=False)


def cayley_neumann(q_NBB: torch.Tensor, num_terms: int) -> torch.Tensor:
    """Returns the truncated Neumann series of the Cayley transform, [N, B, B].

    The sum is ``I + 2 Q + 2 Q^2 + ... + Q^k`` with ``k = max(num_terms - 1, 3)`` for three terms or more (the last
    power counts once; peft's counting makes three terms equal four), and ``I + 2 Q`` for two. It is orthogonal only
    while Q is small: see ``orthogonality_error``.
    """
    r_NBB = torch.eye(q_NBB.shape[-1], dtype=q_NBB.dtype, device=q_NBB.device) + 2.0 * q_NBB
    if num_terms == 2:
        return r_NBB
    power_NBB = q_NBB @ q_NBB
    r_NBB = r_NBB + 2.0 * power_NBB
    for _ in range(3, num_terms - 1):
        power_NBB = power_NBB @ q_NBB
        r_NBB = r_NBB + 2.0 * power_NBB
    return r_NBB + power_NBB @ q_NBB


def rotation(entries_NE: torch.Tensor, block_size: int, cayley_neumann_terms: int | None) -> torch.Tensor:
    """Returns rotation blocks [N, B, B] from the adapter's entries [N, E] of any float dtype.

    The blocks are fp32, or fp64 for fp64 entries.

    Args:
        entries_NE: the trained tensor, as peft stores it (``oft_R.weight``).
        block_size: B.
        cayley_neumann_terms: terms of the series, ``None`` for the exact transform.
    """
    wide = torch.promote_types(entries_NE.dtype, torch.float32)
    q_NBB = skew_symmetric(entries_NE.to(wide), block_size)
    return cayley(q_NBB) if cayley_neumann_terms is None else cayley_neumann(q_NBB, cayley_neumann_terms)


def rotate(x_TD: torch.Tensor, r_NBB: torch.Tensor) -> torch.Tensor:
    """Applies the block-diagonal rotation to activations: returns ``x R``, of the same shape and dtype as ``x``.

    The blocks are rounded to the activations' dtype first, as a tensor-core kernel would have them; trainer and server
    both round, so they compute the same numbers. The identity is exact in every dtype.

    Args:
        x_TD: activations [..., D].
        r_NBB: blocks [N, B, B] with N * B = D.
    """
    n, b, _ = r_NBB.shape
    x_NTB = x_TD.reshape(-1, n, b).transpose(0, 1)
    return torch.bmm(x_NTB, r_NBB.to(x_TD.dtype)).transpose(0, 1).reshape(x_TD.shape)


def merge(weight_OD: torch.Tensor, r_NBB: torch.Tensor) -> torch.Tensor:
    """Returns the weight ``W R^T`` whose plain linear equals the rotated one, computed in the rotation's dtype."""
    return rotate(weight_OD.to(r_NBB.dtype), r_NBB.transpose(-2, -1))


def orthogonality_error(r_NBB: torch.Tensor) -> torch.Tensor:
    """Returns the Frobenius norm of ``R^T R - I`` per block, [N], dimensionless; it is 0 for an exact rotation.

    For the five-term series an eigenvalue ``i t`` of Q contributes about ``2 t^4``.
    """
    eye_BB = torch.eye(r_NBB.shape[-1], dtype=r_NBB.dtype, device=r_NBB.device)
    return torch.linalg.matrix_norm(r_NBB.transpose(-2, -1) @ r_NBB - eye_BB)
