"""The real scheduler on a device that computes nothing and takes its time: the test reads off when tokens come. As in
the overlapping engine, a step is scheduled while the one before it runs, shortly before that ends."""

import random
from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from simulated_device import MAX_MODEL_LEN, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, h200_seconds, rehearsed

from models.batch import PromptLogprobs, SamplingParams, StepOutput
from models.shared_runs import SharingLimits
from server.engine.kv_cache import KVCache
from server.engine.launch_timing import LaunchTiming
from server.engine.limits import SchedulerConfig
from server.engine.messages import AddRequest, TokenDelta
from server.engine.scheduler import Scheduler
from server.engine.sharing import PrefixSharing
from server.engine.step import LaunchedRow
from server.engine.step_time import StepTimeModel, StepWork
from server.engine.token_ids import TokenIds
from server.engine.tpot_target import TpotTarget

BLOCK_SIZE = 64
LAUNCH_SECONDS = 0.01  # between those of a graph and of 8,192 rows kernel by kernel


@dataclass(slots=True)
class Answer:
    arrival: float
    token_times: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.arrival

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]


class SimulatedEngine:
    def __init__(
        self,
        *,
        tpot_target: float | TpotTarget | None = 0.028,
        num_blocks: int = 13_000,
        max_num_seqs: int = MAX_NUM_SEQS,
        max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS,
        model: StepTimeModel | None = None,
        sharing: SharingLimits | None = None,
        device: Callable[[StepWork], float] = h200_seconds,
        overlaps: bool = True,
    ) -> None:
        """`device`: how long it takes over a step; `overlaps`: a step is launched while the one before runs."""
        self.now = 0.0
        self._device = device
        self._overlaps = overlaps
        self.cache = KVCache(num_blocks, BLOCK_SIZE)
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=128_000,
            eos_token_ids=(0,),
            tpot_target=TpotTarget(tpot_target) if isinstance(tpot_target, float) else tpot_target,
        )
        self.model = rehearsed() if model is None else model
        self.scheduler = Scheduler(
            config,
            self.cache,
            clock=lambda: self.now,
            step_time=self.model,
            sharing=None if sharing is None else PrefixSharing(sharing),
        )
        self.timing = LaunchTiming()
        self.answers: dict[str, Answer] = {}
        self.step_seconds: list[float] = []
        self._arrivals: list[tuple[float, str, AddRequest]] = []
        self._random = random.Random(0)

    def ask(
        self, name: str, at: float, prompt: int | list[int], out: int, tenant: bytes = b"", *, scored: bool = False
    ) -> None:
        """`prompt`: token ids, or how many random ones."""
        if isinstance(prompt, int):
            prompt = self._random.choices(range(1, 120_000), k=prompt)
        sampling = SamplingParams(max_tokens=out, ignore_eos=True, prompt_logprobs=0 if scored else None)
        message = AddRequest(name, TokenIds(prompt), sampling, tenant)
        insort(self._arrivals, (at, name, message), key=lambda item: item[:2])
        self.answers[name] = Answer(at)

    def run(self, until: float = float("inf")) -> None:
        """Until all is answered, or the time comes."""
        in_flight: list[LaunchedRow] | None = None
        ends = self.now  # of the step in flight
        predicted = 0.0  # of that
        while self.now < until and (self._arrivals or self.scheduler.has_work or in_flight):
            if in_flight is not None and self._overlaps:
                self.now = min(self.now + self.timing.patience(predicted, 0.0), ends)
            self._receive()
            step = self.scheduler.schedule()
            launched: list[LaunchedRow] | None = None
            begins = ends
            if step is not None:
                assert step.total_tokens <= self.scheduler.config.max_num_batched_tokens
                assert sorted(step.num_tokens, key=lambda count: count != 1) == step.num_tokens
                launched = self.scheduler.launched(step)
                self.timing.launched(LAUNCH_SECONDS)
                predicted, seconds = self.model.predict(step.work), self._device(step.work)
                self.scheduler.observe(step, seconds)
                self.step_seconds.append(seconds)
                ends = max(begins, self.now) + seconds
            if not self._overlaps:
                in_flight, launched, begins = launched, None, ends
            if in_flight is not None:
                self.now = begins
                self._collect(in_flight)
            elif launched is None:
                assert self._arrivals, "requests wait, and nothing runs"
                self.now = self._arrivals[0][0]
            in_flight = launched

    def ttfts(self, prefix: str) -> list[float]:
        return sorted(answer.ttft for name, answer in self.answers.items() if name.startswith(prefix))

    def gaps(self, prefix: str) -> list[float]:
        return sorted(gap for name, answer in self.answers.items() if name.startswith(prefix) for gap in answer.gaps)

    def _receive(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self.now:
            _, _, message = self._arrivals.pop(0)
            assert not self.scheduler.add(message)

    def _collect(self, rows: list[LaunchedRow]) -> None:
        count = sum(row.samples for row in rows)
        scores = [_scores(row) for row in rows if row.first_scored]
        for event in self.scheduler.postprocess(rows, StepOutput([5] * count, [None] * count, [True] * count, scores)):
            if isinstance(event, TokenDelta):
                self.answers[event.request_id].token_times += [self.now] * len(event.token_ids)
        self.scheduler.running.take_released_slots()


def _scores(row: LaunchedRow) -> PromptLogprobs:
    last = row.request.num_prompt_tokens - 1
    zeros = bytes(4 * (min(row.end, last) - row.first_scored + 1))
    return PromptLogprobs(0, zeros, zeros, b"", b"")


def poisson(rng: random.Random, rate: float, begin: float, end: float) -> Iterator[float]:
    at = begin + rng.expovariate(rate)
    while at < end:
        yield at
        at += rng.expovariate(rate)


def quantile(values: list[float], p: float) -> float:
    return sorted(values)[min(len(values) - 1, int(p * len(values)))]
