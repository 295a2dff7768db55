"""An engine that dies, hangs or never comes up: what was open fails, and the next one serves."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import fake_runner
import pytest
import zmq
from fake_runner import expected
from real_engine import FOREVER, LIMIT, collect, config, drain, engine, exists, in_loop, outcome, request, until

from server.engine import client as client_module
from server.engine.client import EngineClient
from server.engine.deaths import Deaths
from server.errors import EngineUnavailable


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
async def test_who_is_refused_while_it_restarts_is_told_to_wait_as_long_as_that_took() -> None:
    async with engine() as client:
        assert client.seconds_to_ready == 0
        client._starts.seconds = 40.0  # as a large model's
        stream = client.generate(request("a", [1], FOREVER))
        await anext(stream)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        broken, refused = await outcome(drain(stream)), await outcome(collect(client, request("b", [1])))
        assert all(isinstance(error, EngineUnavailable) for error in (broken, refused))
        assert all(30 < (error.retry_after or 0) <= 50 for error in (broken, refused))
        assert 0 < client.seconds_to_ready <= 40
        await client.ready()
        assert client.seconds_to_ready == 0


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


@in_loop
async def test_a_restart_that_hangs_is_replaced_and_counts_as_a_death() -> None:
    client = EngineClient(config(), least_start=2.0)
    await client.start()
    await client.ready()
    first = client.pid
    assert first is not None
    client._starts.seconds = 0.1
    os.kill(first, signal.SIGKILL)
    await until(lambda: client.pid not in (None, first))
    hung = client.pid
    assert hung is not None
    os.kill(hung, signal.SIGSTOP)  # before it has said anything
    client._starts.seconds = 1.0  # the next one has more time
    await until(lambda: not exists(hung))
    await client.ready()
    assert client.num_deaths == 2
    assert await collect(client, request("again", [1])) == expected([1], 8, stop=())
    await client.shutdown()


@in_loop
async def test_a_restart_is_heard_of_while_it_loads() -> None:
    """So that one which takes long, stage by stage, is not silent."""
    async with engine() as client:
        before = client._last_message
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: not client.is_ready)
        await until(lambda: "step times" in client._starts.stages)
        assert client._last_message > before
        await client.ready()


@in_loop
async def test_a_start_that_lasts_is_told_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client_module, "TELL_SECONDS", 0.05)
    with caplog.at_level("INFO"):
        async with engine() as client:
            told = [record.message for record in caplog.records]
            assert client.num_deaths == 0
    assert told
    assert all(line.startswith("the engine is still loading: ") for line in told)


@in_loop
async def test_restarts_that_never_come_up_end_however_rare_they_are() -> None:
    async with engine() as client:
        client._deaths = Deaths(2, 0.0)
        client.config = config(model="missing")
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: not client.alive)
        assert client.num_deaths == 3
        with pytest.raises(EngineUnavailable, match="no such model"):
            await client.ready()


@in_loop
async def test_an_engine_is_gone_when_none_will_come_any_more() -> None:
    client = EngineClient(config(), max_deaths=0)
    await client.start()
    gone = asyncio.ensure_future(client.gone())
    await client.ready()
    assert not gone.done()
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    await gone
    assert not client.alive
    await client.shutdown()


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


@pytest.mark.parametrize("most", range(1, 4))
@in_loop
async def test_an_engine_for_which_there_are_no_sockets_says_so_and_leaves_nothing(
    most: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Full(zmq.Context):  # type: ignore[type-arg]
        def __init__(self, io_threads: int) -> None:
            super().__init__(io_threads)
            self.set(zmq.MAX_SOCKETS, most)

    monkeypatch.setattr(zmq, "Context", Full)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    client = EngineClient(config())
    with pytest.raises(EngineUnavailable, match="cannot be started: Too many open files"):
        await client.start()
    assert not client.alive
    await client.shutdown()
    assert not list(tmp_path.iterdir())


@in_loop
async def test_an_engine_that_cannot_be_started_again_stays_dead(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(client_module, "ROOM_SECONDS", 0.01)
    async with engine() as client:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: not client.alive)
        assert client.num_deaths == 4
        with pytest.raises(EngineUnavailable, match="missing"):
            await client.ready()


async def dies_where_there_is_no_room(
    client: EngineClient, full: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    await until(lambda: "It is tried again" in caplog.text)


@in_loop
async def test_an_engine_for_which_there_is_no_room_just_now_is_started_when_there_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client_module, "ROOM_SECONDS", 0.5)
    async with engine() as client:
        with monkeypatch.context() as full:
            await dies_where_there_is_no_room(client, full, tmp_path, caplog)
        await client.ready()
        assert await collect(client, request("again", [1])) == expected([1], 8, stop=())


@in_loop
async def test_a_server_that_ends_starts_no_engine_though_there_is_room_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client_module, "ROOM_SECONDS", 0.1)
    async with engine() as client:
        with monkeypatch.context() as full:
            await dies_where_there_is_no_room(client, full, tmp_path, caplog)
        await client.shutdown()
        assert client.pid is None
        assert not client.alive


@in_loop
async def test_a_refusal_to_serve_is_passed_on_as_it_is() -> None:
    client = EngineClient(config(model="refused"))
    await client.start()
    with pytest.raises(EngineUnavailable, match=r"^The engine is not running: this model has no attention.$"):
        await client.ready()
    await client.shutdown()


PARENT = """
import asyncio, sys
from server.engine.client import EngineClient
from real_engine import config

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
