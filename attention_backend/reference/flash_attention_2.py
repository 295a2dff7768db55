"""FlashAttention-2 (https://arxiv.org/abs/2307.08691), Algorithms 1 and 2, for reading. q, k, v `[..., N, d]`.

Against the first: the outer loop runs over Q, so blocks of rows need nothing of each other; the output is divided by
its sum once, at the end; backward keeps lse = m + log l only.
"""

import torch
from torch import Tensor


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False, block_r: int = 32, block_c: int = 64
) -> tuple[Tensor, Tensor]:
    """(O, lse `[..., N, 1]`). Causal is aligned to the bottom right."""
    outs, lses = [], []
    for first_row in range(0, q.shape[-2], block_r):
        q_i = q[..., first_row : first_row + block_r, :]
        acc = q_i.new_zeros(*q_i.shape[:-1], v.shape[-1])
        row_sum = q_i.new_zeros(*q_i.shape[:-1], 1)
        row_max = torch.full_like(row_sum, -torch.inf)
        for first_key in range(0, _last_key(q, k, first_row + q_i.shape[-2], causal), block_c):
            k_j, v_j = (x[..., first_key : first_key + block_c, :] for x in (k, v))
            s = _scores(q, k, q_i, k_j, first_row, first_key, scale, causal)
            new_max = torch.maximum(row_max, s.amax(-1, keepdim=True))
            shift = new_max.masked_fill(new_max == -torch.inf, 0.0)
            p = torch.exp(s - shift)
            decay = torch.exp(row_max - shift)
            row_sum = decay * row_sum + p.sum(-1, keepdim=True)
            acc = decay * acc + p @ v_j
            row_max = new_max
        outs.append(acc / row_sum.masked_fill(row_sum == 0, 1.0))
        lses.append(row_max + row_sum.log())
    return torch.cat(outs, -2), torch.cat(lses, -2)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    scale: float,
    causal: bool = False,
    block_r: int = 32,
    block_c: int = 64,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dQ, dK, dV). The outer loop runs over K and V, whose gradients stay on chip; dQ is added to as it goes."""
    dq, dks, dvs = torch.zeros_like(q), [], []
    delta = (grad_out * out).sum(-1, keepdim=True)
    safe_lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # rows that see nothing: exp(s - inf) = 0
    for first_key in range(0, k.shape[-2], block_c):
        k_j, v_j = (x[..., first_key : first_key + block_c, :] for x in (k, v))
        dk_j, dv_j = torch.zeros_like(k_j), torch.zeros_like(v_j)
        for first_row in range(0, q.shape[-2], block_r):
            rows = slice(first_row, first_row + block_r)
            q_i, do_i = q[..., rows, :], grad_out[..., rows, :]
            if _last_key(q, k, first_row + q_i.shape[-2], causal) <= first_key:
                continue  # the whole block lies above the diagonal
            s = _scores(q, k, q_i, k_j, first_row, first_key, scale, causal)
            p = torch.exp(s - safe_lse[..., rows, :])
            dv_j += p.mT @ do_i
            ds = p * (do_i @ v_j.mT - delta[..., rows, :])
            dq[..., rows, :] += scale * ds @ k_j
            dk_j += scale * ds.mT @ q_i
        dks.append(dk_j)
        dvs.append(dv_j)
    return dq, torch.cat(dks, -2), torch.cat(dvs, -2)


def _last_key(q: Tensor, k: Tensor, end_row: int, causal: bool) -> int:
    """The end of the keys that rows before `end_row` can see."""
    return min(k.shape[-2], end_row + k.shape[-2] - q.shape[-2]) if causal else k.shape[-2]


def _scores(
    q: Tensor, k: Tensor, q_i: Tensor, k_j: Tensor, first_row: int, first_key: int, scale: float, causal: bool
) -> Tensor:
    s = scale * q_i @ k_j.mT
    if not causal:
        return s
    position = torch.arange(first_row, first_row + q_i.shape[-2], device=q.device) + k.shape[-2] - q.shape[-2]
    key = torch.arange(first_key, first_key + k_j.shape[-2], device=q.device)
    return s.masked_fill(key > position[:, None], -torch.inf)
