"""The door to the engine for text: reserve, tokenise, check, start. Must not know HTTP or the wire format."""

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Protocol

from server.engine.admission import Admission
from server.engine.messages import AddRequest, EngineReady
from server.engine.token_ids import TokenIds
from server.errors import (
    ContextLengthExceeded,
    EngineUnavailable,
    InvalidRequest,
    LongwaveError,
    PayloadTooLarge,
    retry_after_in,
)
from server.long_work import LongWork
from server.metrics import Metrics
from server.text.chat_template import ChatPrompt, Pieces, any_length, encode_chat
from server.text.generation import Generation, Job, Prompt, TokenEngine
from server.text.prompt_memory import PromptMemory
from server.text.tokenizer import TextTokenizer

LIKELY_CHARACTERS = 8  # of a token: texts have about four, and one that is longer is rarely one that fits
MOST_TOKENIZED = 2**18  # tokens that are given of a text, or as many as the context has, where that is longer
COUNTED_TOO_MANY = 1.25  # times what fits, counted in pieces: however they were cut, the whole does not fit


class RestartingEngine(TokenEngine, Protocol):
    """Which says when it is likely to be there again."""

    @property
    def seconds_to_ready(self) -> float: ...


class Generator:
    """Opens generations and knows the open ones."""

    def __init__(
        self,
        engine: RestartingEngine,
        tokenizer: TextTokenizer,
        admission: Admission,
        metrics: Metrics,
        ready: EngineReady,
        *,
        max_n: int,
        on_active: Callable[[bool], None],
    ) -> None:
        """`on_active` is called with True when there is work again, and with False when there is none any more."""
        self.tokenizer = tokenizer
        self.ready = ready
        self._engine = engine
        self._admission = admission
        self._metrics = metrics
        self._max_n = max_n
        self._on_active = on_active
        self._open: set[Generation] = set()
        self._prompt_memory = PromptMemory()
        self._long_work = LongWork()
        self.num_active = 0  # open ones, and those still being tokenised
        self._idle = asyncio.Event()
        self._idle.set()

    async def open(self, job: Job) -> Generation:
        """Capacity first: a request that will be refused for load costs no tokenising. Raises server.errors."""
        if job.n > self._max_n:
            raise InvalidRequest(f"n is {job.n}; at most {self._max_n} choices are served at once.", param="n")
        if not self._engine.is_ready:
            again = retry_after_in(self._engine.seconds_to_ready)
            raise EngineUnavailable("The engine is restarting. Try again later.", retry_after=again)
        with ExitStack() as stack:
            stack.enter_context(self._admission.reserve(job.num_choices, job.cache_salt))
            stack.enter_context(self._active())
            requests = await self._requests(job)
            scored = [
                (len(request.prompt_token_ids), request.sampling.prompt_logprobs)
                for request in requests
                if request.sampling.prompt_logprobs is not None
            ]
            if scored:
                param = "logprobs" if job.prompt_logprobs is None else "prompt_logprobs"
                stack.enter_context(self._prompt_memory.hold(scored, job.cache_salt, param))
            echoes = await self._echoes(job) if job.echo else None
            reservation = stack.pop_all()
        generation = Generation(
            job,
            requests,
            engine=self._engine,
            tokenizer=self.tokenizer,
            metrics=self._metrics,
            reservation=reservation,
            long_work=self._long_work,
            echoes=echoes,
        )
        self._open.add(generation)
        reservation.callback(self._open.discard, generation)
        return generation

    @contextmanager
    def reserve(self, num_sequences: int, tenant: bytes) -> Iterator[None]:
        """Room for work that speaks with the engine in token ids alone. Raises ServerOverloaded, InvalidRequest."""
        with self._admission.reserve(num_sequences, tenant), self._active():
            yield

    async def idle(self) -> None:
        """Returns when no generation is open."""
        await self._idle.wait()

    def fail_all(self, error: LongwaveError) -> None:
        for generation in list(self._open):
            generation.fail(error)

    async def tokenize(self, prompt: ChatPrompt | str, *, add_special_tokens: bool) -> Sequence[int]:
        """Of a text that need not fit the context. Few tokens may be long work: megabytes of spaces are one word.
        Raises PayloadTooLarge, InvalidRequest."""
        limit = max(MOST_TOKENIZED, self.ready.max_model_len)

        def check(at_least: int, most: int = limit, what: str = "tokens") -> None:
            if at_least > most:
                message = f"The text has at least {at_least} {what}; {most} are served at most. Send it in pieces."
                raise PayloadTooLarge(message, param="prompt" if isinstance(prompt, str) else "messages")

        def check_length(pieces: Pieces) -> None:
            check(sum(len(text) for text, _ in pieces), LIKELY_CHARACTERS * limit, "characters")
            check(self._fewest_tokens(limit, pieces))

        tokens = await self.encode(prompt, add_special_tokens=add_special_tokens, check_length=check_length, fits=False)
        check(len(tokens))
        return tokens

    async def encode(
        self,
        prompt: Prompt,
        *,
        add_special_tokens: bool = True,
        check_length: Callable[[Pieces], None] = any_length,
        fits: bool = True,
    ) -> Sequence[int]:
        """`check_length` is called with a text before that is encoded, where that is encoded, and may raise. `fits`:
        whether that is for what fits the model's context."""
        if isinstance(prompt, ChatPrompt):
            return await encode_chat(self.tokenizer, prompt, check_length, fits=fits)
        if isinstance(prompt, str):
            encode = partial(self._encode_text, prompt, add_special_tokens, check_length)
            return await self.tokenizer.in_thread(encode, len(prompt), fits=fits)
        self.check_vocabulary(prompt, "prompt")
        return prompt

    async def _requests(self, job: Job) -> list[AddRequest]:
        self.check_vocabulary(job.sampling.stop_token_ids, "stop_token_ids")
        self.check_vocabulary(job.sampling.logit_bias, "logit_bias")
        prompts = []
        for prompt in job.prompts:
            tokens = await self.encode(prompt, check_length=partial(self._check_text, job))
            prompts.append(tokens if isinstance(tokens, TokenIds) else TokenIds(tokens))
            await asyncio.sleep(0)  # short prompts are encoded on the event loop, and there may be many
        max_tokens = [self._max_tokens(job, len(prompt)) for prompt in prompts]
        self._metrics.params_n.observe(job.n)
        self._metrics.params_max_tokens.observe(max(max_tokens))
        return [
            AddRequest(
                request_id=f"{job.request_id}-{at * job.n + choice}",
                prompt_token_ids=prompt,
                sampling=replace(
                    job.sampling,
                    max_tokens=max(limit, 1),
                    seed=_choice_seed(job.sampling.seed, choice),
                    prompt_logprobs=job.num_scored(choice),
                ),
                cache_salt=job.cache_salt,
                adapter=job.adapter,
            )
            for at, (prompt, limit) in enumerate(zip(prompts, max_tokens, strict=True))
            for choice in range(job.n)
        ]

    async def _echoes(self, job: Job) -> list[str]:
        """For each choice of a text job whose prompts fit, its prompt as text."""
        texts = []
        for prompt in job.prompts:
            texts.append(await self._text(prompt))
            await asyncio.sleep(0)  # as with encoding
        return [text for text in texts for _ in range(job.n)]

    async def _text(self, prompt: Prompt) -> str:
        if isinstance(prompt, str):
            return prompt
        tokens = await self.encode(prompt)
        return await self.tokenizer.in_thread(partial(self.tokenizer.decode, tokens), len(tokens))

    def _max_tokens(self, job: Job, num_prompt_tokens: int) -> int:
        """Checks that the request can ever fit; where the caller named no limit, all the room there is."""
        if num_prompt_tokens == 0:
            raise InvalidRequest("The prompt is empty: it has no tokens.", param=job.prompt_field)
        with _about(job.prompt_field):
            # A prompt alone needs room for one token, too.
            self._admission.check(num_prompt_tokens, job.max_tokens or None)
        room = self.ready.max_model_len - num_prompt_tokens
        limit = room if job.max_tokens is None else job.max_tokens
        if job.sampling.min_tokens > limit:
            raise InvalidRequest(
                f"min_tokens is {job.sampling.min_tokens}, but at most {limit} tokens can be generated.",
                param="min_tokens",
            )
        return limit

    def _encode_text(self, text: str, add_special_tokens: bool, check_length: Callable[[Pieces], None]) -> list[int]:
        check_length([(text, False)])
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _check_text(self, job: Job, pieces: Pieces) -> None:
        with _about(job.prompt_field):
            self._admission.check_at_least(self._fewest_tokens(self.ready.max_model_len, pieces))

    def _fewest_tokens(self, limit: int, pieces: Pieces) -> int:
        """So many tokens, or more, they have. Megabytes that have more than `limit` are not encoded: not whatever
        tokens they are, and not where they have many more as far as one has counted. That takes as long as encoding:
        texts of a usual length are counted only where samples of them have too many."""
        fewest = sum(self.tokenizer.fewest_tokens(text) for text, _ in pieces)
        characters = sum(len(text) for text, _ in pieces)
        if fewest > limit or characters <= limit:
            return fewest
        usual = characters <= LIKELY_CHARACTERS * limit
        if usual and sum(self.tokenizer.estimate(text, plain=plain) for text, plain in pieces) <= limit:
            return fewest
        counted, enough = 0, int(limit * COUNTED_TOO_MANY) + 1
        for text, plain in pieces:
            counted += self.tokenizer.count_up_to(enough - counted, text, plain=plain)
        return int(counted / COUNTED_TOO_MANY) if counted >= enough else fewest

    def check_vocabulary(self, token_ids: Collection[int], field: str) -> None:
        """Raises InvalidRequest for a token that the model does not have."""
        if not token_ids:
            return
        ends = (token_ids.largest(),) if isinstance(token_ids, TokenIds) else (min(token_ids), max(token_ids))
        size = self.ready.vocab_size
        if not all(0 <= token_id < size for token_id in ends):
            raise InvalidRequest(f"{field} names a token outside the vocabulary of {size} tokens.", param=field)

    @contextmanager
    def _active(self) -> Iterator[None]:
        self.num_active += 1
        if self.num_active == 1:
            self._idle.clear()
            self._on_active(True)
        try:
            yield
        finally:
            self.num_active -= 1
            if not self.num_active:
                self._idle.set()
                self._on_active(False)


@contextmanager
def _about(field: str) -> Iterator[None]:
    """Names the field in what is raised about its length."""
    try:
        yield
    except ContextLengthExceeded as error:
        error.param = field
        raise


def _choice_seed(seed: int | None, choice: int) -> int | None:
    """Choices of a seeded request differ from each other and are the same each time; stays a signed 64-bit number."""
    return None if seed is None else (seed + choice + 2**63) % 2**64 - 2**63
