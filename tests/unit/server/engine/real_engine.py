"""Client and engine over real processes and sockets, with the fake runner behind them."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from models.batch import SamplingParams
from server.engine.client import EngineClient
from server.engine.config import EngineConfig
from server.engine.messages import AddRequest, TokenDelta
from server.engine.token_ids import TokenIds
from server.errors import LongwaveError

LIMIT = 30.0  # seconds for anything to happen: generous, since the machine may be busy
FOREVER = 900_000  # tokens: more than any test waits for


def config(**changes: Any) -> EngineConfig:
    return EngineConfig(
        **{
            "model": "fake",
            "runner": "fake_runner:load",
            "max_model_len": 1_000_000,
            "num_gpu_blocks_override": 40_000,
            "max_num_batched_tokens": 512,
            **changes,
        }
    )


def request(name: str, prompt: list[int], max_tokens: int = 8, **sampling: Any) -> AddRequest:
    sampling = {"ignore_eos": True, **sampling}
    return AddRequest(name, TokenIds(prompt), SamplingParams(max_tokens=max_tokens, **sampling))


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 2 * LIMIT))

    return run


@contextlib.asynccontextmanager
async def engine(**changes: Any) -> AsyncIterator[EngineClient]:
    client = EngineClient(config(**changes))
    await client.start()
    try:
        await client.ready()
        yield client
    finally:
        await client.shutdown()


async def until(condition: Callable[[], object], limit: float = LIMIT) -> None:
    async with asyncio.timeout(limit):
        while not condition():
            await asyncio.sleep(0.005)


async def collect(client: EngineClient, message: AddRequest) -> list[int]:
    return [token async for delta in client.generate(message) for token in delta.token_ids]


async def outcome(awaitable: Awaitable[object]) -> object:
    try:
        return await awaitable
    except LongwaveError as error:
        return error


def idle(client: EngineClient) -> bool:
    stats = client.stats
    return (
        stats is not None
        and stats.num_running + stats.num_waiting == 0
        and stats.num_free_blocks == stats.num_blocks > 0
    )


async def drain(stream: AsyncIterator[TokenDelta]) -> None:
    async for _ in stream:
        pass


def exists(pid: int) -> bool:
    """False for zombies too: whether they are collected is their parent's business."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
