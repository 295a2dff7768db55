"""One request as the API sees it: prompts in, text of all its choices out, one reservation, one end. Must not know HTTP
or the wire format; what it promises: however it ends, every engine request of it is closed."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

from prometheus_client import Histogram

from models.batch import SamplingParams
from server.engine.messages import AddRequest, TokenDelta
from server.engine.token_ids import TokenIds
from server.errors import LongwaveError, RequestFailedError
from server.long_work import LongWork
from server.metrics import Metrics
from server.patience import Patience
from server.text.chat_template import ChatPrompt
from server.text.choice import ChoiceText, TextDelta, TextFinish
from server.text.details import PromptDetails
from server.text.pieces import in_pieces, is_long
from server.text.scored_prompt import ScoredPrompt
from server.text.tokenizer import TextTokenizer

logger = logging.getLogger("longwave")

MAX_UNREAD = 64  # deltas waiting for the reader; then they wait (bounded, too) on the engine's side
#: Log-probabilities in them, those of alternatives included, before one delta more: spelled out they take 150 bytes.
MAX_UNREAD_LOGPROBS = 32

Prompt = ChatPrompt | str | TokenIds


class TokenEngine(Protocol):
    """What a generation needs of server.engine.client.EngineClient."""

    @property
    def is_ready(self) -> bool: ...

    def generate(self, request: AddRequest) -> AsyncGenerator[TokenDelta, None]: ...


@dataclass(frozen=True, slots=True)
class Job:
    """What to generate. `sampling.max_tokens` is a placeholder: `max_tokens` (None: as many as fit; 0: the engine
    generates a token, which nobody sees) decides. So is `sampling.prompt_logprobs`, for which `num_scored` does."""

    request_id: str
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    max_tokens: int | None
    arrival_time: float
    n: int = 1
    stop: tuple[str, ...] = ()
    cache_salt: bytes = b""
    adapter: str | None = None  # None: the base model
    prompt_field: str = "prompt"  # named in errors
    echo: bool = False  # whether prompts are shown in front of their choices
    prompt_logprobs: int | None = None  # alternatives of prompts' tokens, whose log-probabilities are told apart

    @property
    def num_choices(self) -> int:
        return self.n * len(self.prompts)

    @property
    def echoed_logprobs(self) -> int | None:
        """Alternatives of prompts' tokens that are shown with their log-probabilities, as those of generated ones."""
        return self.sampling.logprobs if self.echo else None

    def num_scored(self, choice: int) -> int | None:
        """Alternatives of its prompt's tokens that the engine scores with a choice; None: it scores no prompt. One is
        scored with the first of its choices alone."""
        wanted = () if choice % self.n else (self.echoed_logprobs, self.prompt_logprobs)
        return max((count for count in wanted if count is not None), default=None)


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Generation:
    """Runs a job's engine requests and merges their text. Read it with `next`; always `aclose` it."""

    def __init__(
        self,
        job: Job,
        requests: Sequence[AddRequest],
        *,
        engine: TokenEngine,
        tokenizer: TextTokenizer,
        metrics: Metrics,
        reservation: ExitStack,
        long_work: LongWork,
        echoes: Sequence[str] | None = None,
    ) -> None:
        """`long_work`: that of all generations. `echoes`: each request's prompt as it is shown in front of its choice;
        None: no prompt is."""
        self.job = replace(job, prompts=())  # they have become tokens: texts of megabytes may be few
        self.requests = requests
        self.long_work = long_work
        self.echoes = [""] * len(requests) if echoes is None else echoes
        self._engine = engine
        self._metrics = metrics
        self._reservation = reservation
        self._choices = [
            ChoiceText(
                tokenizer,
                index,
                prompt_token_ids=request.prompt_token_ids,
                stop=job.stop,
                min_tokens=job.sampling.min_tokens,
                echo=self.echoes[index],
                follows_details=job.echoed_logprobs is not None,
                prompt_only=job.max_tokens == 0,
            )
            for index, request in enumerate(requests)
        ]
        self._prompts = [
            ScoredPrompt(
                PromptDetails(tokenizer, requests[first].prompt_token_ids, self.echoes[first]),
                range(first, first + job.n),
                echoed=job.echoed_logprobs,
                told_apart=job.prompt_logprobs,
            )
            for first in range(0, len(requests), job.n)
            if job.num_scored(first) is not None  # of all prompts or of none
        ]
        self._cached = [0] * len(requests)
        self._unread: asyncio.Queue[TextDelta | LongwaveError | None] = asyncio.Queue()
        self._num_unread = 0  # log-probabilities in the queue
        self._was_read = asyncio.Event()
        self._patience = Patience()  # of the reader
        self._running = len(requests)
        self._ended = False  # the queue's last item is in it
        self._failed = False  # not by its reader, who may leave
        self._closed = False
        self._tasks = [asyncio.create_task(self._run(index)) for index in range(len(requests))]

    @property
    def usage(self) -> Usage:
        firsts = range(0, len(self.requests), self.job.n)  # a prompt counts once, however many choices it has
        return Usage(
            prompt_tokens=sum(len(self.requests[first].prompt_token_ids) for first in firsts),
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
            cached_tokens=sum(self._cached[first] for first in firsts),
        )

    async def next(self, timeout: float | None = None) -> TextDelta | None:
        """The next piece of any choice; None when all are complete. Raises TimeoutError, or what made it fail."""
        if self._unread.empty():
            with self._patience.limit(timeout):
                item = await self._unread.get()
        else:
            item = self._unread.get_nowait()
        self._was_read.set()
        if isinstance(item, LongwaveError):
            raise item
        if item is not None:
            self._num_unread -= item.num_logprobs
        return item

    def fail(self, error: LongwaveError) -> None:
        """Ends it now: the reader gets what was already generated, then `error`."""
        if not self._ended:
            self._failed = True
            self._end(error)
            for task in self._tasks:
                task.cancel()

    async def aclose(self) -> None:
        """Aborts what still runs and gives the reservation back. May be called any number of times."""
        if self._closed:
            return
        self._closed = True
        self._patience.close()
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            for _ in range(self._running):
                self._metrics.finished("error" if self._failed else "abort")
            self._metrics.max_generation_tokens.observe(max(choice.num_tokens for choice in self._choices))
            self._reservation.close()

    def _end(self, error: LongwaveError | None) -> None:
        self._ended = True
        self._unread.put_nowait(error)

    async def _run(self, index: int) -> None:
        try:
            await self._read_engine(index)
        except LongwaveError as error:
            self.fail(error)
        except Exception:
            logger.exception("request %s failed", self.requests[index].request_id)
            self.fail(RequestFailedError("The server failed to answer this request."))

    async def _read_engine(self, index: int) -> None:
        arrival = last = self.job.arrival_time
        async with aclosing(self._engine.generate(self.requests[index])) as deltas:
            async for delta in deltas:
                now = time.monotonic()
                if delta.token_ids:
                    self._latency(self._choices[index]).observe(now - last)
                    last = now
                self._cached[index] = max(self._cached[index], delta.num_cached_tokens)
                finish_reason = await self._spell(index, delta)
                if finish_reason is not None:
                    break
            else:
                raise RequestFailedError("The engine ended this request without a result.")
        self._finished(index, finish_reason, time.monotonic() - arrival)

    async def _spell(self, index: int, delta: TokenDelta) -> TextFinish | None:
        """Why the choice has ended, if it has."""
        for at, piece in enumerate(in_pieces(delta)):
            may_be_long = is_long(piece)
            if at and not may_be_long:  # others have their turn
                await asyncio.sleep(0)
            async with self.long_work.piece() if may_be_long else nullcontext():
                text = self._choices[index].feed(piece)
            if self._prompts:
                await self._tell(self._prompts[index // self.job.n], index, piece)
            if not piece.prompt_logprobs:
                await self._put(text)
            if text.finish_reason is not None:
                return text.finish_reason
        return None

    async def _tell(self, prompt: ScoredPrompt, index: int, piece: TokenDelta) -> None:
        """Returns when that choice may say what it has of its own: whichever is first to have it, the prompt's details
        stand in front."""
        if index != prompt.choices[0]:
            await prompt.was_told.wait()
            return
        details, may_be_long = prompt.feed(piece.prompt_logprobs or ()), is_long(piece)
        while (said := await self.long_work.next(details) if may_be_long else next(details, None)) is not None:
            await self._put(said)
        if not piece.prompt_logprobs:
            prompt.was_told.set()

    def _latency(self, choice: ChoiceText) -> Histogram:
        return self._metrics.inter_token_latency if choice.num_tokens else self._metrics.time_to_first_token

    async def _put(self, delta: TextDelta) -> None:
        while self._unread.qsize() >= MAX_UNREAD or self._num_unread >= MAX_UNREAD_LOGPROBS:
            self._was_read.clear()
            await self._was_read.wait()
        if not self._ended:
            self._num_unread += delta.num_logprobs
            self._unread.put_nowait(delta)

    def _finished(self, index: int, reason: str, seconds: float) -> None:
        self._running -= 1
        self._metrics.finished(reason)
        self._metrics.e2e_latency.observe(seconds)
        self._metrics.prefill_computed_tokens.observe(len(self.requests[index].prompt_token_ids) - self._cached[index])
        if not self._running and not self._ended:
            self._end(None)
