"""What nobody rehearsed is learned from a few steps, on processors and models of quite different proportions."""

import random
from collections.abc import Callable

import pytest
from simulated_device import amx_seconds, cpu_seconds

from server.engine.step_learning import FIRST_STEPS, MOST_KINDS, LearningStepTime
from server.engine.step_time import StepSample, StepWork, work_of

Device = Callable[[StepWork], float]


def eight_billion(work: StepWork) -> float:
    """Parameters, on two cores: attention is little beside the products."""
    pairs = work.pairs + work.few_pairs
    return 1.2 + 55e-3 * work.rows + 0.7e-6 * pairs + 20e-6 * work.kv_tokens + 20e-6 * work.chunk_keys


def started(device: Device) -> LearningStepTime:
    return LearningStepTime(StepSample(work, device(work)) for work in map(work_of, FIRST_STEPS))


def chunk(model: LearningStepTime, context: int, floors: float) -> StepWork:
    """As a step is cut that may last so many floors."""
    count = model.largest_chunk(StepWork(), context, floors * model.floor, 2048)
    return work_of([(context, max(count, 16))])


@pytest.mark.parametrize("device", [cpu_seconds, amx_seconds, eight_billion])
def test_a_few_steps_of_a_prompt_teach_how_long_others_take(device: Device) -> None:
    model = started(device)
    for context in (0, 500, 1000, 1500, 2000):
        for floors in (20, 2):
            work = chunk(model, context, floors)
            model.observe(work, device(work))
    for context in (200, 800, 1700):
        for floors in (2, 10, 20):
            work = chunk(model, context, floors)
            assert device(work) == pytest.approx(model.predict(work), rel=0.25)


@pytest.mark.parametrize("device", [cpu_seconds, amx_seconds, eight_billion])
def test_no_step_that_is_cut_before_much_is_known_lasts_twice_as_long_as_it_may(device: Device) -> None:
    model = started(device)
    for context in (0, 100, 500, 2000, 6000):
        work = chunk(model, context, 20)
        assert device(work) < 2 * 20 * model.floor
        model.observe(work, device(work))


def test_of_steps_of_one_kind_the_newest_counts() -> None:
    model = LearningStepTime([])
    for seconds in (1.0, 30.0, 1.0):  # the second was disturbed
        model.observe(work_of([(1000, 400)]), seconds)
        assert model.predict(work_of([(1000, 400)])) == pytest.approx(seconds, rel=0.05)


def test_steps_that_score_teach_what_scoring_takes_and_a_new_fit_forgets_nothing_of_it() -> None:
    model = started(cpu_seconds)
    scored = StepWork().with_chunk(500, 300, is_scored=True)
    plain = model.predict(scored._replace(scored=0))
    for _ in range(30):
        model.observe(scored, 3 * plain)
    assert model.predict(scored) == pytest.approx(3 * plain, rel=0.1)
    assert model.predict(scored._replace(scored=0)) == plain
    model.observe(StepWork(100), 2 * model.predict(StepWork(100)))  # quite another time: all is fitted again
    assert model.predict(scored) > 2 * model.predict(scored._replace(scored=0))


def test_a_machine_that_has_become_slower_is_learned_anew() -> None:
    model = started(cpu_seconds)
    rng = random.Random(0)
    for slower in (1.0, 4.0):
        for _ in range(400):
            decodes = [(rng.randrange(3000), 1)] * rng.choice([1, 2, 4])
            work = work_of([*decodes, *rng.choice([[], [(rng.randrange(3000), rng.choice([30, 200, 400]))]])])
            model.observe(work, slower * cpu_seconds(work))
    for work in map(work_of, ([(1000, 1)], [(1000, 1), (500, 30)], [(2000, 400)])):
        assert model.predict(work) == pytest.approx(4 * cpu_seconds(work), rel=0.3)


def test_a_step_of_each_kind_is_remembered_and_the_oldest_kinds_are_not() -> None:
    model = started(cpu_seconds)
    model.observe(work_of([(0, 1)]), 100.0)  # has no word any more when so many others have come
    for number in range(MOST_KINDS):
        work = work_of([(1 << number % 12, 1)] * (1 << number // 12))
        model.observe(work, cpu_seconds(work))
    slow = work_of([(1 << 11, 1)] * 4)
    model.observe(slow, 2 * cpu_seconds(slow))  # fitted again
    assert model.floor < 2 * cpu_seconds(StepWork(1))


def test_a_clock_that_stands_still_teaches_nothing() -> None:
    model = started(cpu_seconds)
    before = model.predict(StepWork(100))
    model.observe(StepWork(100), 0.0)
    assert model.predict(StepWork(100)) == before


def test_nothing_was_measured_and_there_is_a_prediction() -> None:
    model = LearningStepTime([])
    assert model.predict(work_of([(0, 512)])) > model.floor > 0


def test_a_step_that_was_to_take_no_time_at_all_is_learned_from_too() -> None:
    """Times that no part of a prediction explains may leave nothing for a row."""
    model = LearningStepTime([])
    for keys in (100, 400, 1600, 6400, 25_600, 102_400):
        model.observe(StepWork(1, 0, keys), 1e-8 * keys * keys)
    assert model.predict(StepWork(1)) == 0
    model.observe(StepWork(100, 0, 100, scored=100), 0.1)  # in how many rows' time, nobody can say
    for _ in range(3):
        model.observe(StepWork(100), 0.1)
    assert model.predict(StepWork(100)) == pytest.approx(0.1, rel=0.25)
