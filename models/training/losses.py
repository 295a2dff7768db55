"""Losses of tokens from their log-probabilities, summed, as Tinker defines them. Knows no model and no packing.

A sum, never a mean: how data are spread over calls does not change their gradient, and whoever wants a mean divides
the weights or the advantages.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.training.calls import PPO_CLIP, ClipRange, LossName


@dataclass(frozen=True, slots=True)
class LossSum:
    loss: Tensor  # scalar, carries the graph
    clipped: Tensor | None = None  # PPO: tokens whose gradient the clipping has taken away


def loss_sum(
    name: LossName,
    logprobs: Tensor,
    weights: Tensor,
    sampled: Tensor | None = None,
    advantages: Tensor | None = None,
    clip: ClipRange = PPO_CLIP,
) -> LossSum:
    """All float32 `[n]`. `logprobs`: log p of the targets now; `sampled`: when they were sampled, log q.

    cross_entropy: -sum w log p. importance_sampling: -sum w p/q A. ppo: -sum w min(p/q A, clip(p/q) A) (Schulman et al.
    2017, equation 7; token by token).
    """
    if name == "cross_entropy":
        return LossSum(-(logprobs * weights).sum())
    if sampled is None or advantages is None:
        raise ValueError(f"{name} needs the log-probabilities of the sampling policy, and advantages")
    ratio = torch.exp(logprobs - sampled)
    plain = ratio * advantages
    if name == "importance_sampling":
        return LossSum(-(plain * weights).sum())
    bounded = ratio.clamp(clip.low, clip.high) * advantages
    objective = torch.minimum(plain, bounded)
    return LossSum(-(objective * weights).sum(), ((bounded < plain) & (weights != 0)).sum())
