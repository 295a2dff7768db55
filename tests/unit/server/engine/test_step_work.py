"""What a scheduled step says of its work is what the device will do."""

import random

from cranked_engine import Engine, tokens

from server.engine.sharing import SharingLimits
from server.engine.step import ScheduledStep
from server.engine.step_time import work_of


def steps(engine: Engine) -> list[ScheduledStep]:
    """Of a run to the end."""
    seen: list[ScheduledStep] = []
    schedule = engine.scheduler.schedule

    def watched() -> ScheduledStep | None:
        step = schedule()
        if step is not None:
            assert step.work.rows == step.total_tokens
            seen.append(step)
        return step

    engine.scheduler.schedule = watched  # type: ignore[method-assign]
    engine.run()
    return seen


def test_work_is_that_of_the_rows() -> None:
    rng = random.Random(0)
    engine = Engine(budget=64)
    for number in range(6):
        engine.add(f"r{number}", tokens(rng, rng.randrange(1, 200)), max_tokens=10)
    works = []
    launched = engine.scheduler.launched

    def watched(step: ScheduledStep) -> object:
        works.append(work_of((r.num_computed, n) for r, n in zip(step.requests, step.num_tokens, strict=True)))
        return launched(step)

    engine.scheduler.launched = watched  # type: ignore[assignment, method-assign]
    assert [step.work for step in steps(engine)] == works
    assert len(works) > 10


def test_keys_that_decodes_share_are_read_once() -> None:
    rng = random.Random(0)
    engine = Engine(1024)
    assert engine.scheduler.sharing is not None
    engine.scheduler.sharing.limits = SharingLimits(1)
    document = tokens(rng, 800)
    for number in range(4):
        engine.add(f"r{number}", document + tokens(rng, 16), max_tokens=12, ignore_eos=True)
    alone = [step for step in steps(engine) if len(step.requests) == 4 == step.work.rows]
    assert alone
    assert all(step.sharing.decodes for step in alone)
    assert all(800 + 4 * 16 < step.work.kv_tokens <= 800 + 4 * (16 + 12 + 16) for step in alone)
