"""FlashAttention, the paper's Algorithms 0 to 4 (https://arxiv.org/abs/2205.14135), line by line, for reading.

"HBM" is the full tensors, "on chip" the blocks; q, k, v `[..., N, d]`. The outer loop runs over K and V.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_backend.reference.block_dropout import keep_scale, new_state

Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Saved:
    """What Algorithm 2 keeps for the backward pass: O(N) beside the tensors themselves."""

    out: Tensor
    row_sum: Tensor  # l, [..., N, 1]
    row_max: Tensor  # m, [..., N, 1]
    state: int  # R


def standard_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Algorithm 0: (O, P), the N x N matrices written out. `mask` is True where visible."""
    s = _masked(scale * q @ k.mT, mask)
    p = torch.exp(s - _finite(s.amax(-1, keepdim=True)))
    p = p / _nonzero(p.sum(-1, keepdim=True))
    return p @ v, p


def standard_backward(q: Tensor, k: Tensor, v: Tensor, p: Tensor, grad_out: Tensor, scale: float) -> Gradients:
    """Algorithm 3: (dQ, dK, dV) from the P that forward wrote."""
    dv = p.mT @ grad_out
    dp = grad_out @ v.mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True))
    return scale * ds @ k, scale * ds.mT @ q, dv


def block_sizes(sram_elements: int, d: int) -> tuple[int, int]:
    """(B_r, B_c) of Algorithm 1, line 1: K, V, Q and O blocks of d columns share the on-chip memory."""
    columns = max(1, -(-sram_elements // (4 * d)))
    return min(columns, d), columns


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    sram_elements: int = 4096,
) -> Saved:
    """Algorithm 2 (Algorithm 1 without mask and dropout)."""
    state = new_state() if dropout_p else 0
    block_r, block_c = block_sizes(sram_elements, q.shape[-1])
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    row_sum = q.new_zeros(*q.shape[:-1], 1)
    row_max = q.new_full((*q.shape[:-1], 1), -torch.inf)
    for j, columns in _blocks(k.shape[-2], block_c):
        k_j, v_j = k[..., columns, :], v[..., columns, :]
        for i, rows in _blocks(q.shape[-2], block_r):
            s = _masked(scale * q[..., rows, :] @ k_j.mT, _block_of(mask, rows, columns))
            block_max = s.amax(-1, keepdim=True)
            p = torch.exp(s - _finite(block_max))
            block_sum = p.sum(-1, keepdim=True)
            m, l = row_max[..., rows, :], row_sum[..., rows, :]  # noqa: E741 - the paper's names
            new_max = torch.maximum(m, block_max)
            old, new = torch.exp(m - _finite(new_max)), torch.exp(block_max - _finite(new_max))
            new_sum = old * l + new * block_sum
            p_dropped = p * keep_scale(state, i, j, p.shape, dropout_p, p)
            out[..., rows, :] = (l * old * out[..., rows, :] + new * (p_dropped @ v_j)) / _nonzero(new_sum)
            row_sum[..., rows, :], row_max[..., rows, :] = new_sum, new_max
    return Saved(out, row_sum, row_max, state)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    saved: Saved,
    grad_out: Tensor,
    scale: float,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    sram_elements: int = 4096,
) -> Gradients:
    """Algorithm 4: P is computed again from l and m, the dropout mask from R. Block sizes must be forward's."""
    block_r, block_c = block_sizes(sram_elements, q.shape[-1])
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for j, columns in _blocks(k.shape[-2], block_c):
        k_j, v_j = k[..., columns, :], v[..., columns, :]
        for i, rows in _blocks(q.shape[-2], block_r):
            q_i, do_i = q[..., rows, :], grad_out[..., rows, :]
            s = _masked(scale * q_i @ k_j.mT, _block_of(mask, rows, columns))
            p = torch.exp(s - _finite(saved.row_max[..., rows, :])) / _nonzero(saved.row_sum[..., rows, :])
            z = keep_scale(saved.state, i, j, p.shape, dropout_p, p)
            dv[..., columns, :] += (p * z).mT @ do_i
            dp = (do_i @ v_j.mT) * z
            d_i = (do_i * saved.out[..., rows, :]).sum(-1, keepdim=True)  # equation 4: P . dP without the row of P
            ds = p * (dp - d_i)
            dq[..., rows, :] += scale * ds @ k_j
            dk[..., columns, :] += scale * ds.mT @ q_i
    return dq, dk, dv


def _blocks(length: int, size: int) -> Iterator[tuple[int, slice]]:
    for index, first in enumerate(range(0, length, size)):
        yield index, slice(first, min(first + size, length))


def _block_of(mask: Tensor | None, rows: slice, columns: slice) -> Tensor | None:
    return None if mask is None else mask[..., rows, columns]


def _masked(s: Tensor, mask: Tensor | None) -> Tensor:
    return s if mask is None else s.masked_fill(~mask, -torch.inf)


def _finite(maximum: Tensor) -> Tensor:
    """A row that has seen nothing has maximum -inf, and -inf - -inf is NaN."""
    return maximum.masked_fill(maximum == -torch.inf, 0.0)


def _nonzero(total: Tensor) -> Tensor:
    return total.masked_fill(total == 0, 1.0)
