"""The softmax of a row read once, piece by piece (Milakov and Gimelshein, https://arxiv.org/abs/1805.02867).

The idea under every other algorithm here; for reading. Rows are independent: `[..., N]`.
"""

import torch
from torch import Tensor


def online_softmax(scores: Tensor, block: int = 64) -> Tensor:
    """softmax(scores) over the last dimension, its maximum and sum found in one pass over blocks."""
    row_max, row_sum = statistics(scores, block)
    return torch.exp(scores - row_max.unsqueeze(-1)) / row_sum.unsqueeze(-1)


def statistics(scores: Tensor, block: int = 64) -> tuple[Tensor, Tensor]:
    """m = max_j s_j and l = sum_j exp(s_j - m): each new maximum rescales the sum so far by exp(m_old - m_new)."""
    row_max = scores.new_full(scores.shape[:-1], -torch.inf)
    row_sum = scores.new_zeros(scores.shape[:-1])
    for piece in scores.split(block, -1):
        new_max = torch.maximum(row_max, piece.amax(-1))
        row_sum = row_sum * torch.exp(row_max - new_max) + torch.exp(piece - new_max.unsqueeze(-1)).sum(-1)
        row_max = new_max
    return row_max, row_sum


def online_softmax_backward(probabilities: Tensor, grad: Tensor) -> Tensor:
    """dS = P * (dP - D), D = sum_j P_j dP_j (FlashAttention, appendix B.2)."""
    return probabilities * (grad - (probabilities * grad).sum(-1, keepdim=True))
