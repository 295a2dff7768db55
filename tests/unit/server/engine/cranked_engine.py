"""Core, scheduler and fake runner in one process: the test adds requests and turns the crank."""

import random
from collections.abc import Callable
from dataclasses import replace

import fake_runner
import numpy as np
import pytest
from fake_runner import FakeRunner

from models.batch import SamplingParams
from models.shared_runs import SharingLimits
from server.engine.adapters import AdapterTable
from server.engine.core import EngineCore
from server.engine.drafting import Drafter, DraftLimits
from server.engine.kv_cache import KVCache
from server.engine.limits import SchedulerConfig
from server.engine.messages import (
    AbortRequests,
    AdapterLoaded,
    AdapterUnloaded,
    AddRequest,
    CommandFailed,
    CommandReply,
    EngineStats,
    FromEngine,
    LoadAdapter,
    RequestFailed,
    RequestTimes,
    ToEngine,
    TokenDelta,
    UnloadAdapter,
)
from server.engine.request import RequestState
from server.engine.runner import LoadedRunner
from server.engine.scheduler import Scheduler
from server.engine.sharing import PrefixSharing
from server.engine.token_ids import TokenIds


class ListLink:
    """A link of two lists, in one process."""

    def __init__(self) -> None:
        self.inbox: list[ToEngine | RequestFailed] = []
        self.sent: list[FromEngine] = []

    def receive(self, timeout: float) -> list[ToEngine | RequestFailed]:
        del timeout
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, messages: list[FromEngine]) -> None:
        self.sent += messages


class Engine:
    """Core, scheduler and fake runner; the test turns the crank."""

    overlaps = False  # what engines do that are not told
    turn_seconds = 1.0  # that pass by the clock besides what anybody waits
    drafts: DraftLimits | None = None  # the same

    def __init__(
        self,
        num_blocks: int = 256,
        block_size: int = 16,
        *,
        budget: int = 256,
        max_num_seqs: int = 64,
        max_model_len: int = 100_000,
        caching: bool = True,
        queue_timeout: float | None = None,
        max_loras: int = 0,
        max_cpu_loras: int = 16,
        overlaps: bool | None = None,
    ) -> None:
        self.runner = FakeRunner(num_blocks, block_size, max_num_batched_tokens=budget, max_loras=max_loras)
        self.adapters = AdapterTable(max_loras, max_cpu_loras)
        self.cache = KVCache(num_blocks, block_size, enable_prefix_caching=caching)
        self.now = 0.0
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            vocab_size=fake_runner.VOCAB_SIZE,
            eos_token_ids=(fake_runner.EOS,),
            queue_timeout=queue_timeout,
        )
        sharing = PrefixSharing(self.runner.sharing_limits or SharingLimits(0))
        overlaps = self.overlaps if overlaps is None else overlaps
        drafts = self.drafts
        self.scheduler = Scheduler(
            config, self.cache, self.adapters, clock=lambda: self.now, sharing=sharing,
            drafter=None if drafts is None else Drafter(replace(drafts, overlaps=overlaps)),
        )  # fmt: skip
        self.link = ListLink()
        loaded = LoadedRunner(
            runner=self.runner,
            model="fake",
            device="cpu",
            dtype="float32",
            max_model_len=max_model_len,
            max_num_batched_tokens=budget,
            vocab_size=fake_runner.VOCAB_SIZE,
            eos_token_ids=(fake_runner.EOS,),
            overlaps=overlaps,
            probe=self.runner.probe,
        )
        self.core = EngineCore(loaded, self.scheduler, self.link)
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, str | None] = {}
        self.failures: dict[str, RequestFailed] = {}
        self.stats: list[EngineStats] = []
        self.times: dict[str, RequestTimes] = {}
        self.cached: dict[str, int] = {}
        self.scores: dict[str, list[float]] = {}  # of prompts' tokens
        self.replies: dict[int, CommandReply] = {}
        self.num_turns = 0

    def use_cache(self, cache: KVCache) -> None:
        """Before the first turn."""
        self.cache = self.scheduler.cache = self.scheduler.waiting.cache = self.scheduler.running.cache = cache

    def add(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int = 8,
        salt: bytes = b"",
        adapter: str | None = None,
        **sampling: object,
    ) -> None:
        params = SamplingParams(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
        self.link.inbox.append(AddRequest(name, TokenIds(prompt), params, cache_salt=salt, adapter=adapter))

    def begin(self, command: LoadAdapter | UnloadAdapter) -> None:
        self.link.inbox.append(command)

    def command(self, command: LoadAdapter | UnloadAdapter) -> CommandReply:
        """Turns until the reply comes."""
        self.begin(command)
        self.run(until=lambda: command.command_id in self.replies)
        return self.replies[command.command_id]

    def load(self, name: str, folder: str, *, within: str | None = None, replace: bool = False) -> CommandReply:
        return self.command(LoadAdapter(len(self.replies), name, folder, within, replace))

    def unload(self, name: str) -> CommandReply:
        return self.command(UnloadAdapter(len(self.replies), name))

    def abort(self, *names: str) -> None:
        self.link.inbox.append(AbortRequests(list(names)))

    def turn(self) -> None:
        self.num_turns += 1
        self.now += self.turn_seconds
        decoding = {
            r.request_id: r.num_tokens + (r.num_drafts == 0)
            for r in self.scheduler.running
            if r.num_remaining == 1 and not r.awaits_its_end
        }
        self.core.turn()
        self._assert_decodes_went_on(decoding)
        for message in self.link.sent:
            match message:
                case TokenDelta():
                    for some in message.prompt_logprobs or ():
                        assert message.request_id not in self.tokens, "a prompt is scored before there is an answer"
                        self.scores.setdefault(message.request_id, []).extend(np.frombuffer(some.logprobs, np.float32))
                    if message.token_ids or message.finish_reason:
                        self.tokens.setdefault(message.request_id, []).extend(message.token_ids)
                    if message.finish_reason:
                        self.reasons[message.request_id] = message.finish_reason
                    if message.token_ids:
                        self.cached[message.request_id] = message.num_cached_tokens
                case RequestFailed():
                    self.failures[message.request_id] = message
                case EngineStats():
                    self.stats.append(message)
                case RequestTimes():
                    self.times[message.request_id] = message
                case AdapterLoaded() | AdapterUnloaded() | CommandFailed():
                    self.replies[message.command_id] = message
                case _:
                    pytest.fail(f"unexpected {message}")
        self.link.sent.clear()

    def _assert_decodes_went_on(self, decoding: dict[str, int]) -> None:
        for name, least in decoding.items():
            request = self.scheduler.open.by_id.get(name)
            if request is not None and request.state is RequestState.RUNNING:
                assert request.num_tokens >= least, "a running decode had no token in a step"

    def run(self, until: Callable[[], bool] | None = None, limit: int = 100_000) -> None:
        for _ in range(limit):
            if until is not None and until():
                return
            self.turn()
            if until is None and not self.core.has_work:
                return
        pytest.fail("the engine does not come to an end")

    def assert_nothing_is_held(self) -> None:
        self.scheduler.open.check_integrity()
        assert self.cache.num_free_blocks == self.cache.pool.num_usable
        assert not self.runner.slots
        assert not self.scheduler.open.by_id


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, 30_000) for _ in range(count)]
