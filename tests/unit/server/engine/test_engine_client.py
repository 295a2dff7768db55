"""Streams, statistics and orderly ends, over real processes and sockets, with the fake runner behind them."""

import asyncio
import contextlib
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import fake_runner
import pytest
import zmq
from fake_runner import expected
from real_engine import FOREVER, LIMIT, collect, config, drain, engine, exists, idle, in_loop, request, until

from models.batch import SamplingParams
from server.engine import client as client_module
from server.engine.client import EngineClient
from server.engine.link import FROM_ENGINE, encode
from server.engine.messages import AddRequest, FromEngine, RequestTimes, TokenDelta
from server.engine.process import EngineProcess
from server.engine.stream import MAX_EVENTS
from server.errors import ContextLengthExceeded, EngineUnavailable, LongwaveError, RequestFailedError


@in_loop
async def test_tokens_stream_and_everything_is_free_afterwards() -> None:
    seen: list[RequestTimes] = []
    async with engine() as client:
        client.times = seen.append
        ready = await client.ready()
        assert (ready.device, ready.max_model_len, ready.vocab_size) == ("cpu", 1_000_000, fake_runner.VOCAB_SIZE)
        prompts = {f"r{number}": [number + 1] * (3 + 40 * number) for number in range(20)}
        answers = await asyncio.gather(*(collect(client, request(name, prompts[name])) for name in prompts))
        assert answers == [expected(prompt, 8, stop=()) for prompt in prompts.values()]
        await until(lambda: idle(client) and len(seen) == 20)
        assert client.num_open == 0
        assert client.heartbeat_age < LIMIT
        for times in seen:
            assert times.queued <= times.scheduled <= times.first_token <= times.last_token
            assert times.num_generation_tokens == 8


@in_loop
async def test_logprobs_and_finish_reason_cross_the_border() -> None:
    async with engine() as client:
        deltas = [delta async for delta in client.generate(request("a", [1, 2], 3, logprobs=2))]
        assert [delta.finish_reason for delta in deltas] == [None, None, "length"]
        entry = (deltas[0].logprobs or [])[0]
        assert (entry.rank, len(entry.top)) == (1, 2)
        assert entry.top[0][0] == deltas[0].token_ids[0]


@in_loop
async def test_the_sockets_are_private_files_and_gone_once_connected() -> None:
    client = EngineClient(config())
    await client.start()
    assert client._engine is not None
    directory = client._engine.directory
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}
    await client.ready()
    assert not directory.exists()
    await client.shutdown()


@in_loop
async def test_closing_the_iterator_aborts_before_and_after_the_first_token() -> None:
    async with engine(max_num_seqs=16, max_num_batched_tokens=16) as client:
        before = client.generate(request("before", [5] * 900_000, 8))
        waiting = asyncio.ensure_future(anext(before))
        await until(lambda: client.stats and client.stats.num_running)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        await before.aclose()
        after = client.generate(request("after", [7], FOREVER))
        assert (await anext(after)).token_ids
        await after.aclose()
        assert client.num_open == 0
        await until(lambda: idle(client))
        assert client.stats is not None
        assert client.stats.generation_tokens < FOREVER


@in_loop
async def test_abort_ends_the_stream_with_its_reason() -> None:
    async with engine() as client:
        stream = client.generate(request("a", [7], FOREVER))
        await anext(stream)
        client.abort("a")
        client.abort("unknown")
        *_, last = [delta async for delta in stream]
        assert last.finish_reason == "abort"
        await until(lambda: idle(client))


@in_loop
async def test_failures_raise_the_error_that_they_name() -> None:
    async with engine() as client:
        with pytest.raises(ContextLengthExceeded):
            await collect(client, request("long", [1] * 1_000_001))
        with pytest.raises(RequestFailedError):
            await collect(client, request("nan", [fake_runner.NAN]))
        with pytest.raises(RequestFailedError):
            await collect(client, request("raise", [fake_runner.RAISE]))
        with pytest.raises(LongwaveError) as refused:
            await collect(client, request("memory", [fake_runner.OUT_OF_MEMORY]))
        assert refused.value.status == 503
        with pytest.raises(RequestFailedError):
            await collect(client, AddRequest("unreadable", [1], SamplingParams()))  # type: ignore[arg-type]
        assert await collect(client, request("good", [1])) == expected([1], 8, stop=())
        assert client.num_deaths == 0


@in_loop
async def test_an_engine_says_how_long_a_step_may_take_before_the_first_one() -> None:
    async with engine() as client:
        await until(lambda: client.stats)
        assert client.stats is not None
        assert client.stats.prompt_tokens == 0
        assert client.stats.longest_turn > 0


@in_loop
async def test_an_engine_is_idle_once_it_has_said_so_after_all_that_it_was_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "STATS_DELAY", 0.3)
    async with engine() as client:
        await until(lambda: client.is_idle)
        stream = client.generate(request("a", [1], FOREVER))
        await anext(stream)
        assert not client.is_idle
        await stream.aclose()
        assert not client.is_idle
        await until(lambda: client.is_idle)


@in_loop
async def test_shutdown_lets_open_requests_finish() -> None:
    client = EngineClient(config())
    await client.start()
    await client.ready()
    stream = client.generate(request("a", [3], 500))
    await anext(stream)
    rest = asyncio.ensure_future(drain(stream))
    await client.shutdown(timeout=LIMIT)
    await rest
    assert not client.alive
    with pytest.raises(EngineUnavailable):
        await collect(client, request("late", [1]))


@in_loop
async def test_what_an_engine_sent_before_it_ended_is_read_after_it() -> None:
    client = EngineClient(config())
    await client.start()
    await client.ready()
    assert client.pid is not None
    stream = client.generate(request("a", [3], 900))  # frames: what a socket takes that nobody reads
    await anext(stream)
    ending = asyncio.ensure_future(client.shutdown(timeout=LIMIT))
    await asyncio.sleep(0)  # it has told the engine to end
    os.waitid(
        os.P_PID, client.pid, os.WEXITED | os.WNOWAIT
    )  # holds up the loop: nothing is read until the engine ended
    await drain(stream)
    await ending


@in_loop
async def test_what_is_under_way_at_the_end_is_waited_for() -> None:
    engine = EngineProcess(config())
    with zmq.Context() as context, context.socket(zmq.PUSH) as late:  # bytes that come after the process is gone
        late.connect(f"ipc://{engine.directory / FROM_ENGINE}")
        late.send(encode([TokenDelta("a", [1])]))
        await engine.receive()
        engine.kill()
        await engine.ended.wait()
        rest = asyncio.ensure_future(_all(engine.rest()))
        await asyncio.sleep(0.1)
        late.send(encode([TokenDelta("a", [2])]))
    assert [message.token_ids for messages in await rest for message in messages] == [[2]]
    await engine.close()


async def _all(messages: AsyncIterator[list[FromEngine]]) -> list[list[FromEngine]]:
    return [some async for some in messages]


@in_loop
async def test_shutdown_without_time_ends_streams_with_an_error() -> None:
    client = EngineClient(config())
    await client.start()
    await client.ready()
    pid = client.pid
    stream = client.generate(request("a", [3], FOREVER))
    await anext(stream)
    await client.shutdown(timeout=0.0)
    with pytest.raises(EngineUnavailable):
        await drain(stream)
    assert pid is not None
    assert not exists(pid)


@in_loop
async def test_shutdown_while_loading_leaves_nothing() -> None:
    client = EngineClient(config())
    await client.start()
    assert client._engine is not None
    directory, pid = client._engine.directory, client._engine.pid
    await client.shutdown(timeout=LIMIT)
    assert not directory.exists()
    assert not exists(pid)


@in_loop
async def test_a_stopped_reader_does_not_stop_the_others() -> None:
    async with engine() as client:
        slow = client.generate(request("slow", [1], 5000))
        await anext(slow)
        assert await collect(client, request("fast", [2], 3000)) == expected([2], 3000, stop=())
        assert client._streams["slow"].num_events <= MAX_EVENTS
        rest = [token async for part in slow for token in part.token_ids]
        assert rest == expected([1], 5000, stop=())[1:]


@in_loop
async def test_kernels_are_cached_where_the_configuration_says() -> None:
    async with engine(cache_dir="/a/cache") as client:
        environment = Path(f"/proc/{client.pid}/environ").read_bytes().split(b"\0")
        assert b"LONGWAVE_CACHE_DIR=/a/cache" in environment
