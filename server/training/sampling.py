"""Sampling from the weights of now: a temporary adapter in the serving engine, so that samples share its batches.

Token ids in, token ids and log-probabilities out. Must not know HTTP or how weights come about.
"""

import asyncio
import fcntl
import logging
import os
import secrets
import shutil
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing, suppress
from itertools import count
from pathlib import Path
from typing import Protocol

from models.batch import SamplingParams
from server.engine.adapter_registry import AdapterInfo
from server.engine.messages import AddRequest, EngineReady, TokenDelta
from server.errors import (
    ContextLengthExceeded,
    EngineUnavailable,
    InsufficientStorage,
    ModelNotFound,
    RequestFailedError,
)
from server.files.folder import make_private
from server.text.choice import ChoiceText
from server.text.tokenizer import TextTokenizer
from server.training.calls import Sample, Sampled, SampledSequence
from server.training.weights import SCHEME

logger = logging.getLogger("longwave")


class Door(Protocol):
    """What is needed of server.text.generator.Generator."""

    tokenizer: TextTokenizer
    ready: EngineReady

    def reserve(self, num_sequences: int) -> AbstractContextManager[None]: ...


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
    def accepting(self, model: str | None, owner: str = "") -> Door: ...


class Snapshot:
    """One version of a model's weights, as an adapter; it goes when nobody needs it any more."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.num_users = 0
        self.is_current = True


class Snapshots:
    """Folders of this server alone, gone with it: a crash's are swept by the next start."""

    def __init__(self, root: Path, serving: Serving) -> None:
        self._root = root
        self._serving = serving
        self._mine: Path | None = None
        self._lock: int | None = None
        self._numbers = count(1)
        self._undoing: set[asyncio.Task[None]] = set()

    async def make(self, model_id: str, save: Callable[[Path], Awaitable[object]]) -> Snapshot:
        """`save` writes PEFT's folder. Its name is known to this room only. Raises what `save` raises, and what loading
        an adapter does."""
        number = next(self._numbers)  # never used again: what is being removed is not what is being made
        folder = self._place() / f"{model_id}-{number}"
        await save(folder)
        snapshot = Snapshot(f"{SCHEME}{model_id}/current/{number}", folder)
        loading = asyncio.ensure_future(
            self._serving.engine.load_adapter(snapshot.name, str(folder), owner=f"training {secrets.token_hex(8)}")
        )
        try:
            await asyncio.shield(loading)
        except BaseException:  # cancelled, too: then the engine may have it in a moment
            undoing = asyncio.create_task(self._undo(snapshot, loading))
            self._undoing.add(undoing)
            undoing.add_done_callback(self._undoing.discard)
            raise
        return snapshot

    async def _undo(self, snapshot: Snapshot, loading: "asyncio.Future[AdapterInfo]") -> None:
        await asyncio.wait([loading])
        snapshot.is_current = False
        await self.release(snapshot)

    async def release(self, snapshot: Snapshot) -> None:
        """A sample of it has ended, or it is current no longer."""
        if snapshot.is_current or snapshot.num_users:
            return
        try:
            with suppress(ModelNotFound, EngineUnavailable):
                await self._serving.engine.unload_adapter(snapshot.name)
        finally:
            await asyncio.to_thread(shutil.rmtree, snapshot.folder, ignore_errors=True)

    def sweep(self) -> None:
        """What servers left that are no more."""
        for folder in self._root.iterdir() if self._root.is_dir() else ():
            with suppress(OSError):
                descriptor = os.open(folder / "lock", os.O_RDWR)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(descriptor)

    def close(self) -> None:
        if self._mine is not None and self._lock is not None:
            shutil.rmtree(self._mine, ignore_errors=True)
            os.close(self._lock)
            self._mine = self._lock = None

    def _place(self) -> Path:
        """Held by a lock that ends with this process. Raises InsufficientStorage."""
        if self._mine is None:
            try:
                make_private(self._root)
                mine = self._root / f"server-{secrets.token_hex(8)}"
                mine.mkdir(mode=0o700)
                self._lock = os.open(mine / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                logger.error("weights cannot be sampled from: %s", error)
                raise InsufficientStorage(
                    "The server cannot keep weights: its data directory cannot be used."
                ) from error
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self._mine = mine
        return self._mine


async def sample(serving: Serving, adapter: str, call: Sample, salt: bytes) -> Sampled:
    """All samples of the call, together. Raises LongwaveError; the others are aborted then."""
    door = serving.accepting(None)
    with door.reserve(call.num_samples):
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
                prompt_token_ids=list(call.prompt),
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
                arrival_time=time.monotonic(),
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
