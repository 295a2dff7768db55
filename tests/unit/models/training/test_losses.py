"""The losses of a session against formulas written out in float64, token by token, and their gradients by hand."""

import math
import random

import pytest
import torch

from models.training.calls import ClipRange, LossName
from models.training.losses import LossSum, loss_sum

TOKENS = 64


def numbers(seed: int = 0) -> tuple[list[float], list[float], list[float], list[float]]:
    """logprobs, weights, sampled, advantages: ratios from about 0.4 to 2.7, advantages of both signs, some zeros."""
    source = random.Random(seed)
    logprobs = [-source.uniform(0.1, 5) for _ in range(TOKENS)]
    sampled = [value + source.uniform(-1, 1) for value in logprobs]
    weights = [source.choice([0.0, 0.5, 1.0, 2.0]) for _ in range(TOKENS)]
    advantages = [source.choice([0.0, 1.0, -1.0]) * source.uniform(0.1, 3) for _ in range(TOKENS)]
    return logprobs, weights, sampled, advantages


def computed(name: LossName, clip: ClipRange = ClipRange(0.7, 1.5)) -> tuple[LossSum, list[float]]:  # noqa: B008
    logprobs, weights, sampled, advantages = (torch.tensor(values) for values in numbers())
    logprobs.requires_grad_()
    result = loss_sum(name, logprobs, weights, sampled, advantages, clip)
    result.loss.backward()
    assert logprobs.grad is not None
    return LossSum(result.loss.detach(), result.clipped), logprobs.grad.tolist()


def test_cross_entropy_is_the_weighted_sum() -> None:
    result, gradient = computed("cross_entropy")
    logprobs, weights, _, _ = numbers()
    assert float(result.loss) == pytest.approx(-sum(w * lp for lp, w in zip(logprobs, weights, strict=True)), rel=1e-5)
    assert gradient == pytest.approx([-w for w in weights], rel=1e-6)


def test_importance_sampling_is_the_sum_of_ratio_times_advantage() -> None:
    result, gradient = computed("importance_sampling")
    rows = list(zip(*numbers(), strict=True))
    assert float(result.loss) == pytest.approx(-sum(w * math.exp(lp - q) * a for lp, w, q, a in rows), rel=1e-5)
    # d/dlp exp(lp - q) A = exp(lp - q) A
    assert gradient == pytest.approx([-w * math.exp(lp - q) * a for lp, w, q, a in rows], rel=1e-5)


def test_ppo_takes_the_smaller_of_the_plain_and_the_clipped_objective() -> None:
    low, high = 0.7, 1.5
    result, gradient = computed("ppo", ClipRange(low, high))
    loss, slopes, clipped = 0.0, [], 0
    for lp, w, q, a in zip(*numbers(), strict=True):
        ratio = math.exp(lp - q)
        plain, bounded = ratio * a, min(max(ratio, low), high) * a
        loss -= w * min(plain, bounded)
        slopes.append(-w * plain if plain <= bounded else 0.0)
        clipped += bounded < plain and w != 0
    assert float(result.loss) == pytest.approx(loss, rel=1e-5)
    assert gradient == pytest.approx(slopes, rel=1e-5)
    assert result.clipped is not None
    assert 0 < int(result.clipped) == clipped < TOKENS


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "moves"),
    [
        (2.0, 1.0, -1.2, False),  # already much likelier: no more
        (2.0, -1.0, 2.0, True),  # likelier, though it is bad: back
        (0.5, 1.0, -0.5, True),  # less likely, though it is good: back
        (0.5, -1.0, 0.8, False),  # already much less likely: no further
        (1.1, 1.0, -1.1, True),  # inside the range
    ],
)
def test_ppo_clips_on_one_side_only(ratio: float, advantage: float, expected: float, moves: bool) -> None:
    logprobs = torch.tensor([math.log(0.1 * ratio)], requires_grad=True)
    result = loss_sum("ppo", logprobs, torch.ones(1), torch.tensor([math.log(0.1)]), torch.tensor([advantage]))
    result.loss.backward()
    assert float(result.loss.detach()) == pytest.approx(expected, rel=1e-5)
    assert logprobs.grad is not None
    assert (float(logprobs.grad) != 0) is moves
    assert result.clipped is not None
    assert int(result.clipped) == (not moves)


def test_on_policy_importance_sampling_is_the_policy_gradient() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.5])
    loss_sum("importance_sampling", logprobs, torch.ones(3), logprobs.detach(), advantages).loss.backward()
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad, -advantages)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo"])
def test_policy_losses_need_the_sampling_policy(name: LossName) -> None:
    with pytest.raises(ValueError, match="sampling policy"):
        loss_sum(name, torch.zeros(1), torch.ones(1))
