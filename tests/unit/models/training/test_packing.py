"""Packing loses nothing, repeats nothing and keeps to its budget."""

import torch
from bytecodes import executed
from hypothesis import given
from hypothesis import strategies as st
from training_runs import random_examples, random_preferences

from models.training import Example
from models.training.packing import build, pack


@given(lengths=st.lists(st.integers(2, 40), min_size=1, max_size=40), budget=st.integers(40, 100))
def test_every_example_is_in_one_batch_within_the_budget(lengths: list[int], budget: int) -> None:
    examples = [Example((7,) * length, (True,) * length) for length in lengths]
    batches = pack(examples, range(len(lengths)), budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in batch) for batch in batches]
    assert max(sums) <= budget
    # First fit: two batches that would fit into one do not stay two.
    assert all(a + b > budget for i, a in enumerate(sums) for b in sums[i + 1 :])


def plain_first_fit(lengths: list[int], budget: int) -> list[tuple[int, ...]]:
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = (bin_ for bin_ in bins if sum(lengths[i] for i in bin_) + lengths[index] <= budget)
        bin_ = next(fits, None)
        if bin_ is None:
            bins.append(bin_ := [])
        bin_.append(index)
    return [tuple(bin_) for bin_ in bins]


@given(lengths=st.lists(st.integers(1, 60), max_size=70), budget=st.integers(1, 50))
def test_packing_is_first_fit_and_what_is_too_long_goes_alone(lengths: list[int], budget: int) -> None:
    examples = [Example((7,) * length, (True,) * length) for length in lengths]
    assert pack(examples, range(len(lengths)), budget) == plain_first_fit(lengths, budget)


def test_four_times_the_examples_take_little_more_than_four_times_the_work() -> None:
    """Comparing every example with every batch would take sixteen times it."""

    def work(count: int) -> int:
        examples = [Example((7,) * 100, (True,) * 100)] * count
        return executed(lambda: pack(examples, range(count), 150))  # no two fit together: a batch each

    assert work(2000) < 6 * work(500)


def test_packing_depends_on_the_lengths_alone() -> None:
    examples = random_examples(20)
    others = [Example((9,) * len(e), (True,) * len(e)) for e in examples]
    assert pack(examples, range(20), 64) == pack(others, range(20), 64)


def test_an_example_above_the_budget_goes_alone() -> None:
    examples = [Example((7,) * n, (True,) * n) for n in (3, 50, 4)]
    assert pack(examples, range(3), 10) == [(1,), (2, 0)]


def test_a_batch_says_where_its_sequences_lie_and_what_is_learnt() -> None:
    examples = [Example((5, 6, 7), (True, False, True)), Example((8, 9, 10, 11), (False, True, True, False))]
    batch = build(examples, (1, 0), "cpu")
    assert batch.input_ids.tolist() == [[8, 9, 10, 11, 5, 6, 7]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert batch.cu_seqlens.tolist() == [0, 4, 7]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.max_length == 4
    assert batch.rows.tolist() == [0, 1, 5]  # 8 -> 9, 9 -> 10, 6 -> 7
    assert batch.labels.tolist() == [9, 10, 7]
    assert batch.learnt == (2, 1)
    assert (batch.tokens, batch.indices) == (7, (1, 0))


def test_a_preference_is_two_sequences_chosen_first() -> None:
    preferences = random_preferences(2)
    batch = build(preferences, (1,), "cpu")
    chosen, rejected = preferences[1].chosen, preferences[1].rejected
    assert batch.input_ids[0].tolist() == [*chosen.tokens, *rejected.tokens]
    assert batch.learnt == (chosen.learnt, rejected.learnt)
