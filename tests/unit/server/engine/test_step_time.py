"""The prediction is fitted to what was measured, follows what it observes, and can be turned round."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_device import COPY, copying_seconds, h200_seconds, rehearsed

from server.engine.step_time import (
    LARGE_STEP,
    MEMORY_BOUND_ROWS,
    StepSample,
    StepTimeModel,
    StepWork,
    causal_pairs,
    rehearsals,
    work_of,
)

Device = Callable[[StepWork], float]


def _numbers(text: str) -> list[float]:
    return [float(word) for word in text.split() if word[0].isdigit()]


def small_gpu(work: StepWork) -> float:
    return 1e-3 + max(60e-3, 0.4e-3 * work.rows) + 20e-9 * work.pairs + 0.5e-6 * work.kv_tokens


def uneven_gpu(work: StepWork) -> float:
    """Matrix products of a few hundred rows use half of it."""
    return 5e-3 + 40e-6 * min(work.rows, 512) + 20e-6 * max(work.rows - 512, 0) + 0.8e-9 * work.pairs


def fitted(device: Device) -> StepTimeModel:
    return StepTimeModel.fit(StepSample(work, device(work)) for work in map(work_of, rehearsals(8192, 256, 132_096)))


def random_work(rng: random.Random) -> StepWork:
    decodes = [(rng.randrange(32_768), 1) for _ in range(rng.randrange(64))]
    prompts = [(rng.randrange(131_072), rng.randrange(2, 1500)) for _ in range(rng.randrange(4))]
    return work_of(decodes + prompts or [(0, 1)])


def test_pairs_are_counted_as_causal_attention_sees_them() -> None:
    assert causal_pairs(0, 4) == 1 + 2 + 3 + 4
    assert causal_pairs(10, 2) == 11 + 12
    wide = work_of([(100, 1), (50, MEMORY_BOUND_ROWS)])
    rows, pairs = 1 + MEMORY_BOUND_ROWS, causal_pairs(50, MEMORY_BOUND_ROWS)
    assert wide == StepWork(rows, pairs, kv_tokens=101, chunk_keys=50 + MEMORY_BOUND_ROWS)
    assert work_of([(100, 1), (50, 2)]) == StepWork(3, kv_tokens=101 + 52, few_pairs=causal_pairs(50, 2))


def test_pairs_of_few_rows_take_time_where_the_model_is_told_so() -> None:
    few, one = work_of([(3000, 20)]), work_of([(3019, 1)] * 20)
    one = one._replace(kv_tokens=few.kv_tokens)
    assert StepTimeModel().predict(few) == StepTimeModel().predict(one)
    model = StepTimeModel(attention=1e-6, hides_reading=False)
    assert model.predict(few) - model.predict(one) == pytest.approx(1e-6 * causal_pairs(3000, 20))
    assert StepTimeModel.fit([StepSample(one, 1.0)], model).predict(few) > 1.5, "and fitted, too"


@pytest.mark.parametrize("device", [h200_seconds, small_gpu, uneven_gpu, copying_seconds])
def test_a_fitted_model_predicts_steps_it_has_not_seen_within_a_tenth(device: Device) -> None:
    model = fitted(device)
    rng = random.Random(0)
    for _ in range(500):
        work = random_work(rng)
        assert model.predict(work) == pytest.approx(device(work), rel=0.1)


@pytest.mark.parametrize(
    ("device", "keys"),
    [
        (h200_seconds, "29.8 ns a key of a decode, 0.0 ns a key of a chunk"),
        (copying_seconds, "14.9 ns a key of a decode, 49.2 ns a key of a chunk"),
    ],
)
def test_a_model_says_what_it_found(device: Device, keys: str) -> None:
    expected = "5.2 ms a step, 20.6 us a row of many, 0.8 ns a pair of query and key, " + keys
    assert _numbers(str(fitted(device))) == pytest.approx(_numbers(expected), rel=0.1)


@pytest.mark.parametrize("keys", [0.0, 4e-9, COPY])
def test_what_chunks_pay_for_keys_is_told_from_what_they_pay_for_pairs(keys: float) -> None:
    """Seconds a key, from rehearsals whose times are wrong by 2 %."""

    def measured(rng: random.Random, work: StepWork) -> StepSample:
        return StepSample(work, (h200_seconds(work) + keys * work.chunk_keys) * rng.gauss(1, 0.02))

    works = [work_of(chunks) for chunks in rehearsals(8192, 256, 132_096)]
    models = [StepTimeModel.fit(measured(random.Random(seed), work) for work in works) for seed in range(40)]
    found = sorted(model.keys_read(1) for model in models)
    assert found[20] == pytest.approx(keys, abs=3e-9)
    assert all(0 <= each <= keys + 20e-9 for each in found)
    assert found[0] >= keys - 20e-9


def test_noise_in_the_samples_is_averaged() -> None:
    rng = random.Random(0)
    steps = [work_of(chunks) for chunks in rehearsals(8192, 256, 132_096)] * 3
    model = StepTimeModel.fit(StepSample(work, h200_seconds(work) * rng.uniform(0.9, 1.1)) for work in steps)
    for _ in range(200):
        work = random_work(rng)
        assert model.predict(work) == pytest.approx(h200_seconds(work), rel=0.15)


def test_what_no_sample_tells_is_taken_in_proportion() -> None:
    """One prefill on a device twenty times slower than the one that is assumed."""
    prior = StepTimeModel()
    work = work_of([(0, 2048)])
    model = StepTimeModel.fit([StepSample(work, 20 * prior.predict(work))])
    decode = work_of([(4096, 1)] * 16)
    assert model.predict(work) == pytest.approx(20 * prior.predict(work), rel=0.02)
    assert model.predict(decode) == pytest.approx(20 * prior.predict(decode), rel=0.1)


def test_without_samples_there_is_a_model() -> None:
    assert StepTimeModel.fit([]).predict(StepWork(1)) == StepTimeModel().predict(StepWork(1))


def test_observed_steps_correct_a_wrong_model() -> None:
    model = StepTimeModel()
    rng = random.Random(0)
    for _ in range(400):
        work = random_work(rng)
        model.observe(work, small_gpu(work))
    works = [random_work(rng) for _ in range(200)]
    errors = sorted(abs(model.predict(work) / small_gpu(work) - 1) for work in works)
    assert errors[100] < 0.15


def test_one_disturbed_step_changes_little() -> None:
    model = fitted(h200_seconds)
    work = work_of([(1000, 512)])
    before = model.predict(work)
    model.observe(work, 100 * before)
    assert model.predict(work) < 1.06 * before
    model.observe(work, 0.0)
    assert model.predict(work) < 1.06 * before


def test_a_correction_goes_where_the_time_went() -> None:
    model = fitted(h200_seconds)
    decode = work_of([(1000, 1)])
    before = model.predict(decode)
    for _ in range(50):
        deep = work_of([(131_072, 512)])
        model.observe(deep, 2 * h200_seconds(deep))
    assert model.predict(deep) == pytest.approx(2 * h200_seconds(deep), rel=0.05)
    assert model.predict(decode) < 1.4 * before


def test_a_copy_that_takes_longer_than_it_did_is_not_taken_for_pairs() -> None:
    def device(work: StepWork) -> float:
        return copying_seconds(work) + COPY * work.chunk_keys

    model = fitted(copying_seconds)
    rng = random.Random(0)
    for _ in range(400):
        work = work_of([(rng.randrange(400_000, 1_000_000), rng.choice([64, 512]))])
        model.observe(work, device(work))
    for rows in (64, 128, 512):
        work = work_of([(700_000, rows)])
        assert model.predict(work) == pytest.approx(device(work), rel=0.1)


def test_what_is_left_of_a_prompt_costs_what_its_large_steps_cost() -> None:
    model = StepTimeModel(chunk_read=1e-6)
    steps = [work_of([(50_000 + LARGE_STEP * number, LARGE_STEP)]) for number in range(10)]
    expected = sum(map(model.predict, steps))
    assert model.prompt_seconds(50_000, 10 * LARGE_STEP) == pytest.approx(expected, rel=1e-3)
    assert model.prompt_seconds(900_000, 1) > 0.9, "its keys are read whole"


def test_an_error_that_no_part_explains_does_not_move_time_from_part_to_part() -> None:
    """Every fourth step takes half as long again, for a reason that the model does not know."""
    model = fitted(h200_seconds)
    before = model.floor
    deep, mixed = work_of([(100_000, 300), (500, 1)]), work_of([(100_000, 180), (0, 512), (500, 1)])
    for step in range(1000):
        if step % 4 == 0:
            model.observe(mixed, 1.5 * h200_seconds(mixed))
        else:
            model.observe(deep, h200_seconds(deep))
    assert model.floor < 1.5 * before
    assert model.predict(deep) == pytest.approx(h200_seconds(deep), rel=0.2)


@given(
    context=st.integers(0, 1_000_000),
    seconds=st.floats(0, 0.5),
    most=st.integers(0, 10_000),
    decodes=st.lists(st.integers(0, 100_000), max_size=20),
    chunk_read=st.sampled_from([0.0, 4e-9, COPY]),
)
def test_the_largest_chunk_fits_and_one_token_more_does_not(
    context: int, seconds: float, most: int, decodes: list[int], chunk_read: float
) -> None:
    model = StepTimeModel(chunk_read=chunk_read)
    work = work_of((decode, 1) for decode in decodes)
    count = model.largest_chunk(work, context, seconds, most)
    assert 0 <= count <= most
    if count:
        assert model.predict(work.with_chunk(context, count)) <= seconds
    if count < most and count + 1 not in range(1, MEMORY_BOUND_ROWS + 1):  # where a chunk begins to count as one
        assert model.predict(work.with_chunk(context, count + 1)) > seconds


@pytest.mark.parametrize(("tokens", "seqs", "length"), [(8192, 256, 132_096), (512, 4, 600), (1, 1, 2), (64, 64, 64)])
def test_rehearsals_stay_within_the_runners_limits(tokens: int, seqs: int, length: int) -> None:
    steps = rehearsals(tokens, seqs, length)
    assert steps
    for chunks in steps:
        assert len(chunks) <= seqs
        assert 1 <= sum(count for _, count in chunks) <= tokens
        assert all(context >= 0 and count >= 1 and context + count <= length for context, count in chunks)


@pytest.mark.parametrize("scoring", [0.0, 0.3, 3.0])
def test_what_scoring_takes_is_learned_and_changes_no_other_prediction(scoring: float) -> None:
    """In the time of as many rows. Where no graph serves a step, it takes longer for that, too."""
    model = rehearsed()
    row = h200_seconds(StepWork(LARGE_STEP)) / LARGE_STEP
    others = [work_of([(1000, 1)] * 16), work_of([(5000, 2048)])]
    before = [model.predict(work) for work in others]
    for number in range(40):
        work = work_of([(1000, 1)] * 16).with_chunk(100 * number, 512, is_scored=True)
        assert work.scored == 512
        model.observe(work, h200_seconds(work) + scoring * row * work.scored)
    assert [model.predict(work) for work in others] == before
    work = StepWork().with_chunk(2000, 1500, is_scored=True)
    assert model.predict(work) == pytest.approx(h200_seconds(work) + scoring * row * work.scored, rel=0.1)
    plain, scored = (model.prompt_seconds(0, LARGE_STEP, is_scored=is_scored) for is_scored in (False, True))
    assert scored - plain == pytest.approx(scoring * row * LARGE_STEP, rel=0.1, abs=1e-4)
    count = model.largest_chunk(StepWork(), 0, 0.05, 8192, is_scored=True)
    assert model.predict(StepWork().with_chunk(0, count, is_scored=True)) <= 0.05
    assert model.predict(StepWork().with_chunk(0, count + 1, is_scored=True)) > 0.05


def test_a_disturbed_step_that_scores_is_not_believed_to_the_end() -> None:
    model = rehearsed()
    work = StepWork().with_chunk(0, 512, is_scored=True)
    before = model.predict(work)
    model.observe(work, 100.0)
    assert before < model.predict(work) < 5 * before
