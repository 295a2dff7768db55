"""Learning rates: warm-up, then the chosen way down."""

import pytest

from models.training import TrainingPlan
from models.training.schedule import learning_rate


def rates(schedule: str, steps: int = 100, warmup: float = 0.1) -> list[float]:
    plan = TrainingPlan("bundled", learning_rate=1.0, schedule=schedule, warmup_ratio=warmup)  # type: ignore[arg-type]
    return [learning_rate(plan, step, steps) for step in range(steps)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_the_rate_rises_to_its_peak_in_the_warm_up(schedule: str) -> None:
    warm = rates(schedule)
    assert warm[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert warm[10] == 1.0


def test_cosine_and_linear_halve_half_way_and_end_near_zero() -> None:
    for schedule in ("cosine", "linear"):
        after = rates(schedule)
        assert after[55] == pytest.approx(0.5)
        assert after[10:] == sorted(after[10:], reverse=True)
        assert 0 < after[-1] < 0.02
    assert rates("cosine")[32] > rates("linear")[32]


def test_constant_stays() -> None:
    assert set(rates("constant", warmup=0.0)) == {1.0}


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("warmup", [0.0, 0.5, 1.0])
def test_short_runs_learn_in_every_step(steps: int, warmup: float) -> None:
    assert all(0 < rate <= 1 for rate in rates("cosine", steps, warmup))
