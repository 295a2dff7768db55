"""Block-sparse FlashAttention, the paper's Algorithm 5 (https://arxiv.org/abs/2205.14135): zero blocks are skipped.

For reading. q, k, v `[..., N, d]`; `blocks` bool `[ceil(N_q / block_r), ceil(N_k / block_c)]`, True where computed.
"""

from collections.abc import Iterator

import torch
from torch import Tensor


def forward(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, scale: float, block_r: int, block_c: int
) -> tuple[Tensor, Tensor]:
    """(O, lse `[..., N, 1]`): attention where every element of an unlisted block is masked."""
    row_max = q.new_full((*q.shape[:-1], 1), -torch.inf)
    row_sum = torch.zeros_like(row_max)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    for rows, columns in _present(blocks, block_r, block_c):
        s = scale * q[..., rows, :] @ k[..., columns, :].mT
        new_max = torch.maximum(row_max[..., rows, :], s.amax(-1, keepdim=True))
        p, decay = torch.exp(s - new_max), torch.exp(row_max[..., rows, :] - new_max)
        row_sum[..., rows, :] = decay * row_sum[..., rows, :] + p.sum(-1, keepdim=True)
        out[..., rows, :] = decay * out[..., rows, :] + p @ v[..., columns, :]
        row_max[..., rows, :] = new_max
    return out / row_sum.masked_fill(row_sum == 0, 1.0), row_max + row_sum.log()


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    blocks: Tensor,
    scale: float,
    block_r: int,
    block_c: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dQ, dK, dV), over the same blocks."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    delta = (grad_out * out).sum(-1, keepdim=True)
    for rows, columns in _present(blocks, block_r, block_c):
        q_i, do_i, k_j, v_j = q[..., rows, :], grad_out[..., rows, :], k[..., columns, :], v[..., columns, :]
        p = torch.exp(scale * q_i @ k_j.mT - lse[..., rows, :])
        ds = p * (do_i @ v_j.mT - delta[..., rows, :])
        dv[..., columns, :] += p.mT @ do_i
        dk[..., columns, :] += scale * ds.mT @ q_i
        dq[..., rows, :] += scale * ds @ k_j
    return dq, dk, dv


def _present(blocks: Tensor, block_r: int, block_c: int) -> Iterator[tuple[slice, slice]]:
    for i, j in blocks.nonzero().tolist():
        yield slice(i * block_r, (i + 1) * block_r), slice(j * block_c, (j + 1) * block_c)
