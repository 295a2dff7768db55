"""A step is launched shortly before the one in front of it ends, so that who comes meanwhile is in it."""

import random
from collections.abc import Callable
from unittest import mock

import cranked_engine
import fake_runner
import pytest
from cranked_engine import Engine, ListLink, tokens
from fake_runner import FakeRunner, FakeStep, expected

from models.batch import StepBatch, StepOutput
from server.engine.drafting import Drafter, DraftLimits
from server.engine.launch_timing import LAUNCHES, LEAST_DOUBT, MARGIN, MORE_DOUBT, LaunchTiming
from server.engine.messages import RequestFailed, ToEngine
from server.engine.step_time import StepWork

STEP, LAUNCH = 0.1, 0.004  # seconds that the device and a launch take


class TimedStep(FakeStep):
    def __init__(self, output: StepOutput, engine: Engine, ends: float) -> None:
        super().__init__(output)
        self.engine, self.ends = engine, ends

    def is_done(self) -> bool:
        return self.engine.now >= self.ends

    def collect(self) -> StepOutput:
        self.engine.now = max(self.engine.now, self.ends)
        return super().collect()


class TimedRunner(FakeRunner):
    """A device that runs one step after another. Notes how long it had nothing to do before each."""

    engine: Engine
    seconds: Callable[[], float] = staticmethod(lambda: STEP)
    free_at = 0.0

    def __init__(self, *args: int, **kwargs: int) -> None:
        super().__init__(*args, **kwargs)
        self.idle: list[float] = []
        self.rows: list[list[int]] = []  # of each step, each sequence's

    def launch(self, batch: StepBatch) -> TimedStep:
        output = super().launch(batch).collect()
        self.engine.now += LAUNCH
        begin = max(self.free_at, self.engine.now)
        self.idle.append(begin - self.free_at)
        self.rows.append([len(seq.token_ids) for seq in batch.seqs])
        self.free_at = begin + self.seconds()
        return TimedStep(output, self.engine, self.free_at)


class TimedLink(ListLink):
    """Messages come at their time; who waits for one lets time pass."""

    engine: Engine

    def __init__(self) -> None:
        super().__init__()
        self.coming: list[tuple[float, ToEngine | RequestFailed]] = []

    def receive(self, timeout: float) -> list[ToEngine | RequestFailed]:
        self.engine.now += timeout
        self.inbox += [message for at, message in self.coming if at <= self.engine.now]
        self.coming = [(at, message) for at, message in self.coming if at > self.engine.now]
        return super().receive(timeout)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, TimedRunner, TimedLink]:
    """On whose device every step takes as long as is predicted."""
    monkeypatch.setattr(cranked_engine, "FakeRunner", TimedRunner)
    monkeypatch.setattr(cranked_engine, "ListLink", TimedLink)
    monkeypatch.setattr(Engine, "turn_seconds", 0.0)
    engine = Engine(budget=64, overlaps=True)
    monkeypatch.setattr(type(engine.scheduler.step_time), "predict", lambda _self, _work: STEP)
    assert isinstance(engine.runner, TimedRunner)
    assert isinstance(engine.link, TimedLink)
    engine.runner.engine = engine.link.engine = engine
    return engine, engine.runner, engine.link


def test_who_comes_while_a_step_runs_is_in_the_next_one(timed: tuple[Engine, TimedRunner, TimedLink]) -> None:
    engine, runner, link = timed
    rng = random.Random(0)
    first, second = tokens(rng, 7), tokens(rng, 5)
    engine.add("first", first, max_tokens=12)
    while len(runner.rows) < 5:
        engine.turn()
    engine.add("second", second)
    begin = runner.free_at - STEP  # of the step in flight, which was launched before
    link.coming = [(begin + 0.6 * STEP, link.inbox.pop())]
    engine.turn()
    assert runner.rows[4:] == [[1], [1, 5]]
    engine.run()
    assert engine.tokens == {"first": expected(first, 12), "second": expected(second, 8)}
    assert max(runner.idle[1:]) < 1e-6, "the device never waits"


def test_a_device_that_is_sooner_done_than_predicted_is_not_kept_waiting_for_long(
    timed: tuple[Engine, TimedRunner, TimedLink],
) -> None:
    engine, runner, _ = timed
    runner.seconds = lambda: STEP / 2
    engine.add("one", tokens(random.Random(0), 64 * 60))
    engine.run()
    waited = [seconds for seconds in runner.idle[1:] if seconds > 0]
    assert 0 < len(waited) <= 1 + 0.5 / MORE_DOUBT
    assert max(waited) <= LAUNCH + 0.003, "it is seen that a step has ended"


def test_who_waits_for_guesses_to_be_compared_goes_on_as_soon_as_they_are(
    timed: tuple[Engine, TimedRunner, TimedLink],
) -> None:
    engine, runner, _ = timed
    drafter = Drafter(DraftLimits(step_cost=0.0, row_cost=0.0, overlaps=True))
    engine.scheduler.drafter = engine.scheduler.open.drafter = drafter
    prompt = [fake_runner.QUOTES, *tokens(random.Random(0), 20)]
    engine.add("quoting", prompt + prompt[:5], max_tokens=60)
    engine.run()
    assert engine.tokens["quoting"] == expected(prompt + prompt[:5], 60)
    assert drafter.stats.num_drafts > 3
    assert max(runner.idle[1:]) == pytest.approx(LAUNCH)


def test_a_step_that_failed_fails_its_requests_and_nothing_else(timed: tuple[Engine, TimedRunner, TimedLink]) -> None:
    """On a GPU asking whether a step has ended raises what it ended with."""
    engine, runner, _ = timed
    engine.add("first", tokens(random.Random(0), 7), max_tokens=12)
    while len(runner.rows) < 5:
        engine.turn()
    failure = mock.Mock(side_effect=RuntimeError("injected"))
    with mock.patch.multiple(TimedStep, is_done=failure, collect=failure):
        while engine.core.has_work:
            engine.turn()
    assert engine.failures["first"].code == "server_error"
    prompt = tokens(random.Random(1), 9)
    engine.add("second", prompt)
    engine.run()
    assert engine.tokens["second"] == expected(prompt, 8)


def test_without_overlap_nothing_is_put_off(timed: tuple[Engine, TimedRunner, TimedLink]) -> None:
    alone = Engine(budget=64, overlaps=False)
    assert timed
    assert isinstance(alone.runner, TimedRunner)
    assert isinstance(alone.link, TimedLink)
    alone.runner.engine = alone.link.engine = alone
    alone.add("one", tokens(random.Random(0), 640))
    for _ in range(8):
        alone.turn()
        assert alone.core.executor.patience == 0.0
    assert alone.runner.idle[1:8] == pytest.approx([LAUNCH] * 7)


def test_a_launch_is_put_off_by_what_is_left_but_for_what_launches_take_and_predictions_err() -> None:
    timing = LaunchTiming()
    assert timing.patience(STEP, 0.0) == pytest.approx((1 - LEAST_DOUBT) * STEP - MARGIN)
    timing.launched(0.02)
    assert timing.patience(STEP, 0.01) == pytest.approx((1 - LEAST_DOUBT) * STEP - MARGIN - 0.01 - LAUNCHES * 0.02)
    assert timing.patience(0.03, 0.0) == 0.0
    for _ in range(60):
        timing.launched(0.001)  # that it took long once is forgotten
    assert timing.patience(STEP, 0.0) == pytest.approx((1 - LEAST_DOUBT) * STEP - MARGIN - LAUNCHES * 0.001)


def test_doubts_grow_with_each_step_that_ended_too_soon_and_pass_slowly() -> None:
    timing = LaunchTiming()
    for _ in range(10):
        timing.waited(too_long=True)
    assert timing.patience(1.0, 0.0) == 0.0
    for _ in range(10):
        timing.waited(too_long=False)
    assert 0.0 < timing.patience(1.0, 0.0) < 0.1
    for _ in range(1000):
        timing.waited(too_long=False)
    assert timing.patience(1.0, 0.0) == pytest.approx(1.0 - LEAST_DOUBT - MARGIN)


def test_what_a_step_is_predicted_to_take_is_its_work_s(timed: tuple[Engine, TimedRunner, TimedLink]) -> None:
    engine, _, _ = timed
    engine.add("one", tokens(random.Random(0), 640))
    for _ in range(4):
        engine.turn()
    assert 0 < engine.core.executor.patience < engine.scheduler.step_time.predict(StepWork(64))
