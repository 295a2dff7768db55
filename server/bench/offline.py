"""The engine alone under load, through its client and without HTTP. Knows no server of ours or others."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

from models.batch import SamplingParams
from server.bench import outcome as why
from server.bench.lengths import Lengths
from server.bench.outcome import Outcome
from server.bench.workload import RandomPrompts, Turn
from server.engine.client import EngineClient
from server.engine.config import EngineConfig
from server.engine.messages import AddRequest, EngineReady
from server.engine.token_ids import TokenIds
from server.errors import LongwaveError


class OfflineEngine:
    """Answers turns of token ids with outcomes, as server.bench.stream_client does."""

    def __init__(self, client: EngineClient, ready: EngineReady) -> None:
        self._client = client
        self.ready = ready
        self._numbers = count()

    def check(self, input_len: int, output_len: int, vocab_size: int) -> None:
        """Raises ValueError for what could only fail once it has been computed."""
        ready = self.ready
        if input_len + output_len > ready.max_model_len:
            raise ValueError(
                f"a prompt of {input_len} tokens and an answer of {output_len} are {input_len + output_len}: "
                f"the engine serves {ready.max_model_len} together (--max-model-len)"
            )
        if vocab_size > ready.vocab_size:
            raise ValueError(f"--vocab-size is {vocab_size}: the model has {ready.vocab_size} tokens")

    async def complete(self, turn: Turn, planned: float | None = None) -> Outcome:
        """Exactly `turn.max_tokens` tokens. Never raises for what the engine refuses: it is in the outcome."""
        assert isinstance(turn.prompt, list)
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=turn.max_tokens)
        prompt = TokenIds(turn.prompt)
        request = AddRequest(f"bench-{next(self._numbers)}", prompt, sampling)
        now = time.perf_counter()
        outcome = Outcome(turn.prompt_tokens, now if planned is None else planned, sent=now)
        try:
            async for delta in self._client.generate(request):
                if delta.token_ids:
                    outcome.chunks.append((time.perf_counter(), len(delta.token_ids)))
        except LongwaveError as error:
            return outcome.fail(why.STREAM_ERROR, str(error))
        outcome.output_tokens = sum(tokens for _, tokens in outcome.chunks)
        if outcome.output_tokens != turn.max_tokens:
            return outcome.fail(why.OUTPUT_MISMATCH, f"{outcome.output_tokens} instead of {turn.max_tokens}")
        return outcome


@asynccontextmanager
async def offline_engine(config: EngineConfig) -> AsyncIterator[OfflineEngine]:
    """Starts the engine process, and ends it. Raises EngineUnavailable when it cannot start."""
    client = EngineClient(config)
    await client.start()
    try:
        yield OfflineEngine(client, await client.ready())
    finally:
        await client.shutdown()


async def batches(
    engine: OfflineEngine, rounds: int, batch_size: int, input_len: int, output_len: int, vocab_size: int, seed: int
) -> tuple[list[Outcome], float]:
    """`rounds` batches one after the other, all requests of a batch at once, every prompt a new one. The outcomes, and
    the seconds that all batches took together. Raises ValueError."""
    engine.check(input_len, output_len, vocab_size)
    workload = RandomPrompts(batch_size, Lengths(input_len), Lengths(output_len))
    generator = random.Random(seed)
    outcomes: list[Outcome] = []
    seconds = 0.0
    for _ in range(rounds):
        prompts = workload.conversations(range(vocab_size // 10, vocab_size), generator)
        begin = time.perf_counter()
        outcomes += await asyncio.gather(*(engine.complete(turn) for (turn,) in prompts))
        seconds += time.perf_counter() - begin
    return outcomes, seconds
