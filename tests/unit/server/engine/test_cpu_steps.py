"""On a CPU: steps beside decodes last as long as their target says, others longer, and a start rehearses next to
nothing. Times are simulated, of the bundled model on two cores (simulated_device.py)."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_runner import FakeRunner
from simulated_device import amx_seconds, cpu_seconds
from simulated_engine import SimulatedEngine
from test_step_learning import eight_billion, started

from models.batch import SamplingParams, StepBatch, StepOutput
from models.runner import ModelRunner
from models.sampling import LaunchedSample
from server.engine.config import EngineConfig
from server.engine.executor import StepExecutor
from server.engine.kv_cache import KVCache
from server.engine.limits import SchedulerConfig
from server.engine.messages import AddRequest, TokenDelta
from server.engine.prefill import LONGEST_WAIT, WEIGHTS_SHARE
from server.engine.runner import LoadedRunner
from server.engine.scheduler import Scheduler
from server.engine.step_learning import FIRST_STEPS, LearningStepTime
from server.engine.step_time import StepTimeModel, StepWork, work_of
from server.engine.token_ids import TokenIds
from server.engine.tpot_target import DEFAULT_TARGETS, TpotTarget
from server.engine.worker import make_scheduler

sys.path.append(str(Path(__file__).parents[2] / "models"))  # tiny models are made as their own tests make them
from tiny_models import as_loaded, random_model, tiny_config

Device = Callable[[StepWork], float]
LONG = 2621
TARGET = DEFAULT_TARGETS["cpu"]


def engine(device: Device, target: TpotTarget | None = TARGET) -> SimulatedEngine:
    """As the worker makes it; it has served a few requests."""
    engine = SimulatedEngine(
        tpot_target=target,
        max_num_batched_tokens=EngineConfig(model="m").step_tokens("cpu"),
        model=started(device),
        device=device,
        overlaps=False,
    )
    engine.ask("first", 0.0, LONG, 4)
    engine.ask("second", 0.5, 40, 8)
    engine.run()
    engine.step_seconds.clear()
    return engine


def as_it_was(device: Device) -> SimulatedEngine:
    """Up to 512 rows, whoever waits."""
    return SimulatedEngine(
        tpot_target=None, max_num_batched_tokens=512, model=StepTimeModel(), device=device, overlaps=False
    )


def beside_a_long_prompt(engine: SimulatedEngine) -> float:
    """Seconds a token of the chat that has most."""
    begin = engine.now
    engine.ask("long", begin, LONG, 2)
    for number in range(5):
        engine.ask(f"chat{number}", begin + 0.3 + 0.25 * number, 10, 9)
    engine.run()
    return max(sum(engine.answers[f"chat{number}"].gaps) / 8 for number in range(5))


@pytest.mark.parametrize("device", [cpu_seconds, amx_seconds])
def test_chats_beside_a_long_prompt_have_half_of_their_tokens_a_second(device: Device) -> None:
    alone = device(StepWork(1, 0, 15))
    mine, before = engine(device), as_it_was(device)
    found = beside_a_long_prompt(mine)
    assert found < 2.5 * alone
    assert found < 0.75 * beside_a_long_prompt(before)
    assert mine.answers["long"].ttft < 2 * before.answers["long"].ttft
    assert max(mine.ttfts("chat")) < max(LONGEST_WAIT, 2 * mine.model.floor / WEIGHTS_SHARE)


def scoring_seconds(work: StepWork) -> float:
    """A prompt's row that is scored takes about as long again."""
    return cpu_seconds(work) + 0.9e-3 * work.scored


def test_chats_beside_a_prompt_that_is_scored_have_about_as_many() -> None:
    alone, mine = scoring_seconds(StepWork(1, 0, 15)), engine(scoring_seconds)
    mine.ask("long", mine.now, LONG, 2, scored=True)
    mine.ask("chat", mine.now + 0.3, 10, 20)
    mine.run()
    assert len(mine.gaps("chat")) == 19
    assert max(mine.gaps("chat")) < 2.4 * alone


@pytest.mark.parametrize(("device", "most"), [(cpu_seconds, 1.03), (amx_seconds, 0.95)])
@pytest.mark.parametrize("length", [655, LONG])
def test_a_prompt_alone_loses_nothing(device: Device, most: float, length: int) -> None:
    mine, before = engine(device), as_it_was(device)
    for each in (mine, before):
        each.ask("alone", each.now, length, 2)
        each.run()
    assert mine.answers["alone"].ttft < most * before.answers["alone"].ttft


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("device", [cpu_seconds, amx_seconds, eight_billion, scoring_seconds])
def test_no_step_keeps_a_newcomer_or_a_cancellation_waiting_for_long(device: Device, scored: bool) -> None:
    mine = engine(device)
    mine.ask("long", mine.now, 8000, 2, scored=scored)
    mine.run()
    floor = device(StepWork(1))
    assert max(mine.step_seconds) < 1.25 * min(floor / WEIGHTS_SHARE, max(LONGEST_WAIT, 2 * TARGET.of(floor)))


def test_a_newcomer_with_a_question_of_many_rows_is_let_in_beside_a_chat_and_a_long_prompt() -> None:
    """A row of it costs as much as one of the long prompt, and 64 at once are more than the chat may wait for."""
    mine = engine(cpu_seconds)
    begin = mine.now
    mine.ask("long", begin, 8000, 2)
    mine.ask("chat", begin + 0.3, 10, 200)
    mine.ask("question", begin + 3.0, 100, 4)
    mine.run()
    assert mine.answers["question"].ttft < 20 * cpu_seconds(StepWork(1))
    assert mine.answers["question"].token_times[0] < mine.answers["long"].token_times[0] - 1


@pytest.mark.parametrize("milliseconds", [50, 150, 400])
def test_what_the_operator_says_goes(milliseconds: int) -> None:
    mine = engine(cpu_seconds, EngineConfig(model="m", tpot_target_ms=milliseconds).tpot_target("cpu"))
    mine.ask("chat", mine.now, 10, 60)
    mine.run(until=mine.now + 0.1)
    mine.ask("long", mine.now, 1500, 2)
    mine.run(until=mine.answers["long"].arrival + 1.0)
    beside = [gap for gap in mine.gaps("chat") if gap > 0.04]
    assert len(beside) > 1
    assert sorted(beside)[len(beside) // 2] == pytest.approx(milliseconds / 1000, rel=0.25)


def test_the_worker_rehearses_two_small_steps_and_learns_the_rest() -> None:
    config = EngineConfig(model="m")
    runner = FakeRunner(256, 64, 2048)
    runner.keep_batches = True
    target = config.tpot_target("cpu")
    loaded = LoadedRunner(
        runner, "m", "cpu", "float32", 4096, config.step_tokens("cpu"), 32_000, (2,), tpot_target=target
    )
    scheduler = make_scheduler(config, loaded)
    assert isinstance(scheduler.step_time, LearningStepTime)
    assert scheduler.config.tpot_target == TARGET
    rows = [len(seq.token_ids) for batch in runner.batches for seq in batch.seqs]
    assert rows == [work_of(chunks).rows for chunks in FIRST_STEPS] == [1, 32]


class _Launched:
    def __init__(self, runner: "SlowRunner", launched: LaunchedSample, seconds: float) -> None:
        self._runner, self._launched, self._seconds = runner, launched, seconds

    def is_done(self) -> bool:
        return self._launched.is_done()

    def collect(self) -> StepOutput:
        self._runner.now += self._seconds
        return self._launched.collect()


class SlowRunner(ModelRunner):
    """A real one, which takes as long as a larger model by the clock of `now`."""

    now = 0.0

    def launch(self, batch: StepBatch) -> _Launched:  # type: ignore[override]
        seconds = cpu_seconds(work_of((seq.num_computed, len(seq.token_ids)) for seq in batch.seqs))
        return _Launched(self, super().launch(batch), seconds)


def test_a_real_model_answers_the_same_however_its_steps_are_cut() -> None:
    """A chat, and a prompt of 400 tokens that comes when the chat has begun."""
    runner = SlowRunner(
        as_loaded(random_model(tiny_config())),
        block_size=16,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        max_model_len=512,
        num_blocks=100,
    )
    runner.warm_up()
    loaded = LoadedRunner(runner, "tiny", "cpu", "float32", 512, 512, 120, (2,))

    def answers(target: TpotTarget | None) -> tuple[dict[str, list[int]], list[int]]:
        """Tokens of each, and the rows of steps in which both had some."""
        cache = KVCache(runner.num_blocks, runner.block_size, enable_prefix_caching=False)
        limits = SchedulerConfig(8, 512, 512, 120, (2,), tpot_target=target)
        scheduler = Scheduler(limits, cache, clock=lambda: runner.now, step_time=started(cpu_seconds))
        executor = StepExecutor(loaded, scheduler)
        sampling = SamplingParams(40, temperature=0.0, ignore_eos=True)
        scheduler.add(AddRequest("chat", TokenIds(range(3, 23)), sampling, b""))
        found: dict[str, list[int]] = {"chat": [], "long": []}
        shared = []
        for turn in range(200):
            if turn == 5:
                prompt = TokenIds([3 + (7 * i * i + i) % 110 for i in range(400)])
                scheduler.add(AddRequest("long", prompt, sampling, b""))
            step = scheduler.schedule()
            if step is not None and step.has_prompts and len(step.requests) > 1:
                shared.append(step.total_tokens)
            for event in executor.advance(step, begun=scheduler.clock(), waited=False):
                if isinstance(event, TokenDelta):
                    found[event.request_id] += event.token_ids
        return found, shared

    whole, at_once = answers(None)
    cut, in_pieces = answers(TARGET)
    assert at_once == [401]
    assert sum(in_pieces) - len(in_pieces) == 400
    assert max(in_pieces) <= 64
    assert cut == whole
    assert [len(tokens) for tokens in cut.values()] == [40, 40]
