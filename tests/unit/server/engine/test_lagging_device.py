"""An engine on a device that lags: what the runner is told is done when somebody waits for it, in order, as on a GPU.
So nothing may rest on what a step did before it was collected, and a step may fail long after it was launched."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import cranked_engine
import fake_runner
import pytest
from cranked_engine import Engine, tokens
from fake_runner import FakeRunner, expected, expected_scores, make_adapter
from seeds import seeds

from models.batch import SamplingParams, StepBatch, StepOutput
from server.engine import executor
from server.engine.drafting import DraftLimits
from server.engine.messages import FromEngine, RequestFailed, TokenDelta

NUM_ADAPTERS = 3
#: How often steps fail: at the launch, later, for want of memory.
FAILURES = {
    "launch": (0.05, 0.0, 0.0),
    "collect": (0.0, 0.05, 0.0),
    "memory": (0.0, 0.0, 0.1),
    "all": (0.03, 0.03, 0.1),
}


class InjectedError(RuntimeError):
    pass


class LaggingStep:
    def __init__(self, run: Callable[[], StepOutput], catch_up: Callable[[], None]) -> None:
        self._run: Callable[[], StepOutput] | None = run
        self._catch_up = catch_up
        self._output: StepOutput | Exception | None = None

    def run(self) -> None:
        if self._run is not None:
            try:
                self._output = self._run()
            except Exception as error:  # as a GPU's: seen by whoever waits for the step
                self._output = error
            self._run = None

    def is_done(self) -> bool:
        return True

    def collect(self) -> StepOutput:
        self._catch_up()
        output, self._output = self._output, None
        assert output is not None, "a step was collected twice"
        if isinstance(output, Exception):
            raise output
        return output


class LaggingRunner(FakeRunner):
    def __init__(self, *args: int, **kwargs: int) -> None:
        super().__init__(*args, **kwargs)
        self.queue: list[Callable[[], object]] = []
        self.rng = random.Random(0)
        self.failing = (0.0, 0.0, 0.0)
        self.refused: list[Exception] = []  # what the engine must never ask for

    def add_request(self, slot: int, sampling: SamplingParams, prompt_token_ids: object) -> None:
        self.queue.append(partial(super().add_request, slot, sampling, list(prompt_token_ids)))  # type: ignore[call-overload]

    def append_known(self, slot: int, token_ids: object) -> None:
        self.queue.append(partial(super().append_known, slot, list(token_ids)))  # type: ignore[call-overload]

    def remove_request(self, slot: int) -> None:
        self.queue.append(partial(super().remove_request, slot))

    def launch(self, batch: StepBatch) -> LaggingStep:  # type: ignore[override]
        at_launch, later, no_memory = (self.rng.random() < often for often in self.failing)
        if no_memory:
            raise MemoryError
        if at_launch:
            raise InjectedError
        seqs = (s._replace(token_ids=list(s.token_ids), block_ids=list(s.block_ids)) for s in batch.seqs)
        run = partial(self._fail if later else self._run_known, replace(batch, seqs=tuple(seqs)))
        step = LaggingStep(run, lambda: self.catch_up(step))
        self.queue.append(step.run)
        return step

    def catch_up(self, step: LaggingStep | None = None) -> None:
        """Does what is queued, up to a step or to the end."""
        while self.queue:
            operation = self.queue.pop(0)
            operation()
            if step is not None and operation == step.run:
                return

    def _run_known(self, batch: StepBatch) -> StepOutput:
        try:
            return self._run(self._known(batch))
        except Exception as error:
            self.refused.append(error)
            raise

    def _fail(self, batch: StepBatch) -> StepOutput:
        """Its results cannot be read."""
        self._run_known(batch)
        raise InjectedError


class CountingEngine(Engine):
    """Counts how often each request was told its end."""

    def __init__(self, *args: int, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.ends: Counter[str] = Counter()
        send = self.link.send

        def counted(messages: list[FromEngine]) -> None:
            for message in messages:
                if isinstance(message, RequestFailed) or (isinstance(message, TokenDelta) and message.finish_reason):
                    self.ends[message.request_id] += 1
            send(messages)

        self.link.send = counted  # type: ignore[method-assign]


@pytest.fixture(params=[False, True], ids=["without drafts", "with drafts"])
def _drafts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(Engine, "drafts", DraftLimits(step_cost=0.0, row_cost=0.0, max_rows=64))


@pytest.mark.usefixtures("_drafts")
@pytest.mark.parametrize("seed", seeds(2, 4))
@pytest.mark.parametrize("failing", [None, *FAILURES])
def test_whatever_fails_and_when_each_request_ends_once_and_no_answer_is_wrong(
    seed: int, failing: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cranked_engine, "FakeRunner", LaggingRunner)
    monkeypatch.setattr(executor, "MAX_FAILED_STEPS", 1000)
    rng = random.Random(seed)
    engine = CountingEngine(
        rng.randrange(30, 60), 16, budget=rng.choice([24, 64, 512]), max_num_seqs=8, overlaps=True, max_loras=2
    )
    runner = engine.runner
    assert isinstance(runner, LaggingRunner)
    for key in range(1, NUM_ADAPTERS + 1):
        engine.load(f"a{key}", make_adapter(tmp_path / f"a{key}", key))
    runner.rng, runner.failing = random.Random(seed), FAILURES.get(failing or "", (0.0, 0.0, 0.0))
    shared = tokens(rng, 90)
    wanted: dict[str, list[int]] = {}
    scores: dict[str, list[float]] = {}  # of prompts that are to be scored
    for number in range(60):
        prompt = shared[: rng.choice([0, 15, 16, 17, 48, 90])] + tokens(rng, rng.randrange(1, 60))
        if rng.random() < 0.5:
            prompt = [fake_runner.QUOTES, *prompt, fake_runner.QUOTES, *prompt[:4]]
        count, key = rng.randrange(1, 100), rng.randrange(NUM_ADAPTERS + 1)
        num_top = 2 if number % 3 == 0 else None
        engine.add(f"r{number}", prompt, max_tokens=count, adapter=f"a{key}" if key else None, prompt_logprobs=num_top)
        scores[f"r{number}"] = [] if num_top is None else expected_scores(prompt, adapter=key)
        wanted[f"r{number}"] = expected(prompt, count, adapter=key)
        for _ in range(rng.randrange(6)):
            engine.turn()
            engine.scheduler.open.check_integrity()
        if rng.random() < 0.2:
            engine.abort(*rng.sample(sorted(wanted), k=min(3, len(wanted))))
    engine.run()
    runner.catch_up()
    assert not runner.refused
    engine.assert_nothing_is_held()
    assert engine.ends == dict.fromkeys(wanted, 1)
    cut_short = {name for name, reason in engine.reasons.items() if reason == "abort"} | engine.failures.keys()
    assert bool(engine.failures) == (failing is not None)
    for name, answer in wanted.items():
        got = engine.tokens.get(name, [])
        assert got == (answer[: len(got)] if name in cut_short else answer)
        scored = engine.scores.get(name, [])
        assert scored == (scores[name] if got or name not in cut_short else scores[name][: len(scored)])
