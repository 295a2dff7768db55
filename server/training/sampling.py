"""Sampling from the weights of now: a temporary adapter in the serving engine, so that samples share its batches.

Token ids in, token ids and log-probabilities out. Must not know HTTP or how weights come about.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, aclosing
from typing import Protocol

from models.batch import SamplingParams
from server.engine.adapter_registry import AdapterInfo
from server.engine.messages import AddRequest, EngineReady, TokenDelta
from server.errors import ContextLengthExceeded, RequestFailedError
from server.text.choice import ChoiceText
from server.text.tokenizer import TextTokenizer
from server.training.calls import Sample, Sampled, SampledSequence


class Door(Protocol):
    """What is needed of server.text.generator.Generator."""

    tokenizer: TextTokenizer
    ready: EngineReady

    def reserve(self, num_sequences: int, tenant: bytes) -> AbstractContextManager[None]: ...


class AdapterEngine(Protocol):
    """What is needed of server.engine.client.EngineClient."""

    def generate(self, request: AddRequest) -> AsyncGenerator[TokenDelta, None]: ...
    async def load_adapter(
        self, name: str, folder: str, *, owner: str = "", within: str | None = None, replace: bool = False
    ) -> AdapterInfo: ...
    async def unload_adapter(self, name: str) -> None: ...


class Serving(Protocol):
    """What is needed of server.lifecycle.Lifecycle."""

    @property
    def engine(self) -> AdapterEngine: ...
    @property
    def max_model_len(self) -> int | None: ...
    def open_door(self) -> Door: ...


async def sample(serving: Serving, adapter: str, call: Sample, salt: bytes) -> Sampled:
    """All samples of the call, together. Raises LongwaveError; the others are aborted then."""
    door = serving.open_door()
    with door.reserve(call.num_samples, salt):
        limit = call.max_tokens or max(1, door.ready.max_model_len - len(call.prompt))
        if len(call.prompt) + limit > door.ready.max_model_len:
            raise ContextLengthExceeded(
                f"The prompt has {len(call.prompt)} tokens and {limit} are to be sampled; this model's maximum context "
                f"length is {door.ready.max_model_len}.",
                param="prompt",
            )
        request_id = f"sample-{secrets.token_hex(16)}"
        requests = [
            AddRequest(
                request_id=f"{request_id}-{index}",
                prompt_token_ids=call.prompt,
                sampling=SamplingParams(
                    max_tokens=limit,
                    temperature=call.temperature,
                    top_k=max(call.top_k, 0),
                    top_p=call.top_p,
                    seed=None if call.seed is None else (call.seed + index) % 2**63,
                    logprobs=0,
                    stop_token_ids=call.stop_token_ids,
                ),
                cache_salt=salt,
                adapter=adapter,
            )
            for index in range(call.num_samples)
        ]
        tasks = [asyncio.create_task(_one(serving.engine, door.tokenizer, request, call)) for request in requests]
        try:
            return Sampled(tuple(await asyncio.gather(*tasks)))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def _one(engine: AdapterEngine, tokenizer: TextTokenizer, request: AddRequest, call: Sample) -> SampledSequence:
    choice = ChoiceText(tokenizer, 0, prompt_token_ids=request.prompt_token_ids, stop=call.stop)
    tokens: list[int] = []
    logprobs: list[float] = []
    async with aclosing(engine.generate(request)) as deltas:
        async for delta in deltas:
            text = choice.feed(delta)
            fresh = delta.token_ids[: choice.num_tokens - len(tokens)]  # up to the one that completed a stop string
            tokens += fresh
            logprobs += [entry.logprob for entry in (delta.logprobs or ())[: len(fresh)]]
            if text.finish_reason is not None:
                return SampledSequence(tuple(tokens), tuple(logprobs), text.finish_reason)
    raise RequestFailedError("The engine ended this request without a result.")
