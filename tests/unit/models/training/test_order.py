"""The order of the data is a pure function that never changes."""

from hypothesis import given
from hypothesis import strategies as st

from models.training.order import epoch_order, step_examples, step_seed, steps_per_epoch

ORDER = (6, 5, 7, 4, 1, 0, 3, 2)
SEED = 6874649244811043114


@given(count=st.integers(1, 60), batch=st.integers(1, 20), seed=st.integers(0, 2**63 - 1))
def test_every_epoch_shows_every_example_once(count: int, batch: int, seed: int) -> None:
    steps = steps_per_epoch(count, batch)
    for epoch in range(3):
        seen = [i for step in range(steps) for i in step_examples(epoch * steps + step, count, batch, seed)]
        assert sorted(seen) == list(range(count))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    assert len({epoch_order(epoch, 20, seed) for epoch in range(5) for seed in range(5)}) == 25


def test_the_order_is_the_one_of_the_first_release() -> None:
    """Checkpoints of older versions go on with the order that they began with."""
    assert epoch_order(0, 8, 0) == ORDER
    assert step_seed(3, 7) == SEED


def test_steps_draw_random_numbers_of_their_own() -> None:
    assert len({step_seed(step, seed) for step in range(50) for seed in range(50)}) == 2500
    assert all(0 <= step_seed(step, 2**63 - 1) < 2**63 for step in range(50))
