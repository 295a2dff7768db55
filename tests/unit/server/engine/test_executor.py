"""How long a step took, as it is measured, is how long the device ran it, whatever the engine did meanwhile."""

import random
from dataclasses import dataclass, field

import cranked_engine
import fake_runner
import pytest
from cranked_engine import Engine, tokens
from fake_runner import FakeRunner, FakeStep

from models.batch import StepBatch, StepOutput
from server.engine import executor
from server.engine.drafting import Drafter, DraftLimits
from server.engine.step_time import StepTimeModel, StepWork

FAILED_LAUNCH = 40.0  # seconds until it is known
PROBE = 30.0  # seconds, besides waiting for the device


def device_seconds(rows: int) -> float:
    """More than a turn of the engine takes: it waits for the device, not the device for it."""
    return 10.0 + rows / 64


class TimedStep(FakeStep):
    def __init__(self, output: StepOutput, runner: "TimedRunner", ends: float, fails: bool) -> None:
        super().__init__(output)
        self.runner = runner
        self.ends = ends
        self.fails = fails

    def collect(self) -> StepOutput:
        self.runner.wait_until(self.ends)
        if self.fails:
            raise RuntimeError("injected")
        return super().collect()


class TimedRunner(FakeRunner):
    """A device that runs one step after another; the engine's clock goes on when it waits."""

    engine: Engine
    free_at = 0.0
    num_plain = 0  # steps without drafts
    failing = 0.0  # how often a step does at its launch, when it is collected, and for want of memory
    rng = random.Random(0)

    def wait_until(self, time: float) -> None:
        self.engine.now = max(self.engine.now, time)

    def launch(self, batch: StepBatch) -> TimedStep:
        at_launch, later, no_memory = (self.rng.random() < self.failing for _ in range(3))
        try:
            if at_launch or no_memory:
                raise MemoryError if no_memory else RuntimeError("injected")
            output = super().launch(batch).collect()
        except Exception:
            self.engine.now += FAILED_LAUNCH
            raise
        self.num_plain += not any(seq.num_drafts for seq in batch.seqs)
        self.free_at = max(self.free_at, self.engine.now) + device_seconds(sum(len(s.token_ids) for s in batch.seqs))
        return TimedStep(output, self, self.free_at, later)

    def probe(self) -> None:
        self.wait_until(self.free_at)
        self.engine.now += PROBE


@dataclass
class Measured:
    steps: list[tuple[int, float]] = field(default_factory=list)  # (rows, seconds) that predictions learn from
    drafts: list[tuple[int, int, float]] = field(default_factory=list)  # (sequences, drafts, seconds): of their cost


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    seen = Measured()
    of_steps, of_drafts = StepTimeModel.observe, Drafter.observe

    def observe_step(model: StepTimeModel, work: StepWork, seconds: float) -> None:
        seen.steps.append((work.rows, seconds))
        of_steps(model, work, seconds)

    def observe_drafts(drafter: Drafter, num_sequences: int, num_drafts: int, seconds: float) -> None:
        seen.drafts.append((num_sequences, num_drafts, seconds))
        of_drafts(drafter, num_sequences, num_drafts, seconds)

    monkeypatch.setattr(StepTimeModel, "observe", observe_step)
    monkeypatch.setattr(Drafter, "observe", observe_drafts)
    monkeypatch.setattr(Engine, "drafts", DraftLimits(step_cost=0.0, row_cost=0.0, max_rows=64))
    monkeypatch.setattr(cranked_engine, "FakeRunner", TimedRunner)
    monkeypatch.setattr(executor, "MAX_FAILED_STEPS", 1000)
    return seen


def timed_engine(*, overlaps: bool, failing: float = 0.0) -> tuple[Engine, TimedRunner]:
    engine = Engine(budget=64, overlaps=overlaps)
    runner = engine.runner
    assert isinstance(runner, TimedRunner)
    runner.engine, runner.failing, runner.rng = engine, failing, random.Random(0)
    return engine, runner


def ask(engine: Engine, count: int) -> None:
    """Prompts and decodes, with quotations and without, and pauses in between."""
    rng = random.Random(1)
    for number in range(count):
        prompt = tokens(rng, rng.randrange(1, 150))
        if number % 2:
            prompt = [fake_runner.QUOTES, *prompt, fake_runner.QUOTES, *prompt[:4]]
        engine.add(f"r{number}", prompt, max_tokens=40)
        if number % 5 == 0:
            engine.run()
            for _ in range(20):
                engine.turn()
        for _ in range(rng.randrange(10)):
            engine.turn()
    engine.run()


def assert_right(measured: Measured) -> None:
    assert [seconds for _, seconds in measured.steps] == [device_seconds(rows) for rows, _ in measured.steps]
    for num_sequences, num_drafts, seconds in measured.drafts:
        assert seconds == device_seconds(num_sequences + num_drafts)


@pytest.mark.parametrize("overlaps", [False, True])
def test_every_step_is_measured_and_nothing_else_is(measured: Measured, overlaps: bool) -> None:
    engine, runner = timed_engine(overlaps=overlaps)
    ask(engine, 40)
    assert_right(measured)
    assert len(measured.steps) == runner.num_plain > 200
    assert sum(num_drafts > 0 for _, num_drafts, _ in measured.drafts) > 20


@pytest.mark.parametrize("overlaps", [False, True])
def test_failures_beside_a_step_are_not_part_of_its_time(measured: Measured, overlaps: bool) -> None:
    engine, _ = timed_engine(overlaps=overlaps, failing=0.05)
    ask(engine, 100)
    assert_right(measured)
    assert len(engine.failures) > 5
    assert len(measured.steps) > 100
    assert any(num_drafts for _, num_drafts, _ in measured.drafts)


@pytest.mark.parametrize("overlaps", [False, True])
def test_parts_of_a_step_that_found_no_memory_are_measured_alone(measured: Measured, overlaps: bool) -> None:
    engine, runner = timed_engine(overlaps=overlaps)
    runner.memory_for = lambda batch: len(batch.seqs) <= 3
    rng = random.Random(0)
    for number in range(8):
        engine.add(f"r{number}", tokens(rng, 40), max_tokens=30)
    engine.run()
    assert not engine.failures
    assert_right(measured)
    assert len(measured.steps) > 60
