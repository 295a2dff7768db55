"""Client and engine over real processes and sockets, with the fake runner behind them."""

import asyncio
import contextlib
import functools
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import fake_runner
import pytest
import zmq
from fake_runner import expected

from models.batch import SamplingParams
from server.engine import client as client_module
from server.engine.client import EngineClient
from server.engine.config import EngineConfig
from server.engine.link import FROM_ENGINE, encode
from server.engine.messages import AddRequest, FromEngine, RequestTimes, TokenDelta
from server.engine.process import EngineProcess
from server.engine.stream import MAX_EVENTS
from server.engine.token_ids import TokenIds
from server.errors import ContextLengthExceeded, EngineUnavailable, LongwaveError, RequestFailedError

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


@pytest.mark.parametrize("how", ["kill -9", "dies in a step", "loses its device"])
def test_a_dead_engine_fails_every_stream_at_once_and_comes_back(how: str) -> None:
    async def test() -> None:
        async with engine() as client:
            streams = [client.generate(request(f"r{number}", [number + 1], FOREVER)) for number in range(8)]
            for stream in streams:
                await anext(stream)
            waiting = [asyncio.ensure_future(outcome(drain(stream))) for stream in streams]
            if how == "kill -9":
                assert client.pid is not None
                os.kill(client.pid, signal.SIGKILL)
            else:
                token = fake_runner.DIE if how == "dies in a step" else fake_runner.LOST
                waiting.append(asyncio.ensure_future(outcome(collect(client, request("end", [token])))))
            errors = await asyncio.gather(*waiting)
            assert all(isinstance(error, EngineUnavailable) for error in errors)
            assert client.alive
            assert not client.is_ready  # nobody waited for the next one
            assert client.stats is None or client.stats.num_running + client.stats.num_waiting == 0
            with pytest.raises(EngineUnavailable):
                await collect(client, request("meanwhile", [1]))
            await client.ready()
            assert await collect(client, request("again", [1])) == expected([1], 8, stop=())
            assert client.num_deaths == 1

    asyncio.run(asyncio.wait_for(test(), 2 * LIMIT))


@in_loop
async def test_the_next_engine_has_as_many_blocks_though_less_memory_is_free(tmp_path: Path) -> None:
    room = tmp_path / "room"
    room.write_text("300")
    async with engine(model=str(room), num_gpu_blocks_override=None) as client:
        assert (await client.ready()).num_blocks == 300
        room.write_text("7")  # trainers, which outlive an engine, hold the rest
        for _ in range(2):
            assert client.pid is not None
            os.kill(client.pid, signal.SIGKILL)
            await until(lambda: not client.is_ready)
            assert (await client.ready()).num_blocks == 300


@in_loop
async def test_counters_go_on_where_a_dead_engine_left_them() -> None:
    async with engine() as client:
        await collect(client, request("a", [1, 2, 3]))
        await until(lambda: client.stats and client.stats.prompt_tokens == 3)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: not client.is_ready)
        assert client.stats is not None
        assert client.stats.prompt_tokens == 3
        await client.ready()
        await collect(client, request("b", [1, 2]))
        await until(lambda: client.stats and client.stats.prompt_tokens == 5)


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
async def test_an_engine_that_hangs_fails_its_streams_and_is_replaced() -> None:
    client = EngineClient(config(), max_silence=4.0)
    await client.start()
    await client.ready()
    stream = client.generate(request("a", [1], FOREVER))
    await anext(stream)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGSTOP)
    with pytest.raises(EngineUnavailable):
        await drain(stream)
    await client.ready()
    assert await collect(client, request("again", [1])) == expected([1], 8, stop=())
    await client.shutdown()


async def drain(stream: AsyncIterator[TokenDelta]) -> None:
    async for _ in stream:
        pass


@in_loop
async def test_an_engine_that_dies_too_often_stays_dead() -> None:
    client = EngineClient(config(), max_deaths=1)
    await client.start()
    for _ in range(2):
        await client.ready()
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: not client.is_ready)
    with pytest.raises(EngineUnavailable, match="ended by signal 9"):
        await client.ready()
    assert not client.alive
    await client.shutdown()


@in_loop
async def test_many_deaths_leak_no_files_tasks_or_processes() -> None:
    def held() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), len(asyncio.all_tasks())

    client = EngineClient(config(), max_deaths=100)
    await client.start()
    await client.ready()
    before, pids = held(), []
    for _ in range(8):
        stream = client.generate(request("a", [1], FOREVER))
        await anext(stream)
        assert client.pid is not None
        pids.append(client.pid)
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineUnavailable):
            await drain(stream)
        await client.ready()
    assert client.num_open == 0
    await until(lambda: held() == before)
    await client.shutdown()
    assert not any(exists(pid) for pid in pids)


@in_loop
async def test_an_engine_that_can_not_start_says_why_and_is_not_tried_again() -> None:
    client = EngineClient(config(model="missing"))
    await client.start()
    with pytest.raises(EngineUnavailable, match="no such model"):
        await client.ready()
    await until(lambda: not client.alive)
    assert client.num_deaths == 1
    await client.shutdown()


@in_loop
async def test_an_engine_without_room_for_its_sockets_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    far_away = tmp_path / ("x" * zmq.IPC_PATH_MAX_LEN)
    far_away.mkdir()
    for folder in (far_away, tmp_path / "missing"):
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        client = EngineClient(config())
        with pytest.raises(EngineUnavailable, match="engine"):
            await client.start()
        await client.shutdown()
    assert not list(far_away.iterdir())


@in_loop
async def test_an_engine_that_cannot_be_started_again_stays_dead(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with engine() as client:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: not client.alive)
        with pytest.raises(EngineUnavailable, match="missing"):
            await client.ready()


@in_loop
async def test_a_refusal_to_serve_is_passed_on_as_it_is() -> None:
    client = EngineClient(config(model="refused"))
    await client.start()
    with pytest.raises(EngineUnavailable, match=r"^The engine is not running: this model has no attention.$"):
        await client.ready()
    await client.shutdown()


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


def exists(pid: int) -> bool:
    """False for zombies too: whether they are collected is their parent's business."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


PARENT = """
import asyncio, sys
from server.engine.client import EngineClient
from test_engine_client import config

async def main():
    client = EngineClient(config())
    await client.start()
    await client.ready()
    sys.stdout.write(f"{client.pid}\\n")
    sys.stdout.flush()
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_the_engine_goes_when_its_parent_is_killed() -> None:
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert exists(pid)
        parent.kill()
        parent.wait()
        asyncio.run(until(lambda: not exists(pid), limit=10.0))


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
