"""Self-attention does not need O(n^2) memory (Rabe and Staats, https://arxiv.org/abs/2112.05682), for reading.

Each chunk of keys is summarised by itself; all summaries are kept and combined at the end. FlashAttention instead
updates one output as it goes. q, k, v `[..., N, d]`.
"""

import torch
from torch import Tensor

Summary = tuple[Tensor, Tensor, Tensor]  # sum of exp(s - m) v, sum of exp(s - m), m


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, chunk: int = 64) -> Tensor:
    """softmax(scale q k^T) v"""
    parts = zip(k.split(chunk, -2), v.split(chunk, -2), strict=True)
    return _combine([_summarise(q, k_part, v_part, scale) for k_part, v_part in parts])


def backward(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, scale: float, chunk: int = 64
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) by checkpointing: the summaries are leaves of a small graph, then each chunk is computed again,
    its temporary output included, and differentiated alone."""
    parts = list(zip(k.split(chunk, -2), v.split(chunk, -2), strict=True))
    with torch.no_grad():
        summaries = [_summarise(q, k_part, v_part, scale) for k_part, v_part in parts]
    leaves = [x.requires_grad_() for summary in summaries for x in summary[:2]]
    with torch.enable_grad():
        out = _combine(summaries)
        summary_grads = torch.autograd.grad(out, leaves, grad_out)
    dq, dks, dvs = torch.zeros_like(q), [], []
    for index, inputs in enumerate(parts):
        again = [x.detach().requires_grad_() for x in (q, *inputs)]
        with torch.enable_grad():
            summary = _summarise(again[0], again[1], again[2], scale)
        part_grads = torch.autograd.grad(summary[:2], again, summary_grads[2 * index : 2 * index + 2])
        dq += part_grads[0]
        dks.append(part_grads[1])
        dvs.append(part_grads[2])
    return dq, torch.cat(dks, -2), torch.cat(dvs, -2)


def _summarise(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Summary:
    s = scale * q @ k.mT
    maximum = s.detach().amax(-1, keepdim=True)  # a shift that cancels out: it needs no gradient
    weights = torch.exp(s - maximum)
    return weights @ v, weights.sum(-1, keepdim=True), maximum


def _combine(summaries: list[Summary]) -> Tensor:
    values, sums, maxima = (torch.stack(parts) for parts in zip(*summaries, strict=True))  # [chunks, ..., N, .]
    factor = torch.exp(maxima - maxima.amax(0))
    return (values * factor).sum(0) / (sums * factor).sum(0)
