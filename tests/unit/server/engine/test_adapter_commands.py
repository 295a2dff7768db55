"""Adapters over real processes: loaded and unloaded while requests run, and there again after the engine was killed."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import fake_runner
import pytest
from fake_runner import GATE, KEY, expected, make_adapter

from models.batch import SamplingParams
from server.engine.client import EngineClient
from server.engine.config import EngineConfig
from server.engine.messages import AddRequest
from server.engine.token_ids import TokenIds
from server.errors import AdapterExists, EngineUnavailable, InvalidAdapter, ModelNotFound, QuotaExceeded
from server.training.snapshots import Snapshots

LIMIT = 60.0
PROMPT = [1, 2, 3]


def run(test: Callable[[EngineClient], Any], **changes: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT), engine(**changes) as client:
            await test(client)

    asyncio.run(main())


@asynccontextmanager
async def engine(**changes: Any) -> AsyncIterator[EngineClient]:
    fields: dict[str, Any] = {"model": "fake", "runner": "fake_runner:load", "enable_lora": True, "max_loras": 2}
    client = EngineClient(EngineConfig(**{**fields, "num_gpu_blocks_override": 20_000, **changes}))
    await client.start()
    try:
        await client.ready()
        yield client
    finally:
        await client.shutdown()


async def answer(client: EngineClient, name: str, adapter: str | None = None, max_tokens: int = 8) -> list[int]:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    message = AddRequest(name, TokenIds(PROMPT), sampling, adapter=adapter)
    return [token async for delta in client.generate(message) for token in delta.token_ids]


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_adapters_come_and_go_while_requests_run(tmp_path: Path) -> None:
    async def test(client: EngineClient) -> None:
        endless = AddRequest("endless", TokenIds(PROMPT), SamplingParams(max_tokens=3000, ignore_eos=True))
        async with aclosing(client.generate(endless)) as stream:
            await anext(stream)
            infos = [
                await client.load_adapter(f"a{key}", make_adapter(tmp_path / f"a{key}", key), owner=f"owner {key}")
                for key in (1, 2, 3)
            ]
            assert client.adapters() == tuple(infos)
            assert [(info.name, info.owner, info.rank) for info in infos[:1]] == [("a1", "owner 1", 8)]
            names = [None, "a1", "a2", "a3"]
            answers = await asyncio.gather(*(answer(client, f"r{at}", name) for at, name in enumerate(names)))
            assert answers == [expected(PROMPT, 8, stop=(), adapter=key) for key in range(4)]
            await client.unload_adapter("a2")
            assert [info.name for info in client.adapters()] == ["a1", "a3"]
            with pytest.raises(ModelNotFound):
                await answer(client, "late", "a2")
            assert (await anext(stream)).token_ids, "the other request still runs"

    run(test, max_model_len=4096)


def test_an_engine_that_was_killed_has_its_adapters_again_before_it_is_ready(tmp_path: Path) -> None:
    async def test(client: EngineClient) -> None:
        for key in (1, 2, 3):
            await client.load_adapter(f"a{key}", make_adapter(tmp_path / f"a{key}", key))
        before = client.adapters()
        (tmp_path / "a1" / KEY).write_text("11")  # another adapter by now
        (tmp_path / "a3" / KEY).unlink()  # it cannot be loaded again
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: not client.is_ready)
        assert client.adapters() == before
        with pytest.raises(EngineUnavailable):
            await answer(client, "meanwhile", "a1")
        with pytest.raises(EngineUnavailable):
            await client.load_adapter("a4", str(tmp_path / "a1"))
        await client.ready()
        assert await answer(client, "again", "a1") == expected(PROMPT, 8, stop=(), adapter=11)
        assert await answer(client, "too", "a2") == expected(PROMPT, 8, stop=(), adapter=2)
        changed, same = client.adapters()
        assert (changed.digest, changed.created) == ("digest of 11", before[0].created + 10)
        assert same == before[1]  # also when it was made

    run(test)


def test_an_engine_that_dies_while_it_loads_fails_the_command_and_records_nothing(tmp_path: Path) -> None:
    async def test(client: EngineClient) -> None:
        folder = make_adapter(tmp_path / "slow", 1)
        (tmp_path / "slow" / GATE).write_text(str(tmp_path / "never"))
        loading = asyncio.ensure_future(client.load_adapter("slow", folder))
        await asyncio.sleep(0)
        with pytest.raises(AdapterExists, match="being loaded") as refused:
            await client.load_adapter("slow", folder)
        assert not refused.value.is_final  # that loading may fail, as it does
        unloading = asyncio.ensure_future(client.unload_adapter("slow"))
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineUnavailable):
            await loading
        with pytest.raises(ModelNotFound):
            await unloading
        await client.ready()
        assert client.adapters() == ()

    run(test)


def test_an_adapter_unloaded_while_a_new_engine_gets_them_is_gone_from_it_too(tmp_path: Path) -> None:
    async def test(client: EngineClient) -> None:
        gate = tmp_path / "gate"
        gate.touch()
        first, slow = make_adapter(tmp_path / "first", 1), make_adapter(tmp_path / "slow", 2)
        (tmp_path / "slow" / GATE).write_text(str(gate))
        await client.load_adapter("first", first)
        await client.load_adapter("slow", slow)
        gate.unlink()
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: "slow" in client._adapters._busy)  # the new engine has the first
        await client.unload_adapter("first")
        gate.touch()
        await client.ready()
        assert [info.name for info in client.adapters()] == ["slow"]
        await client.load_adapter("first", make_adapter(tmp_path / "other", 3))
        assert await answer(client, "r", "first") == expected(PROMPT, 8, stop=(), adapter=3)

    run(test)


def test_what_is_unloaded_while_it_is_loaded_goes_as_soon_as_it_is_there(tmp_path: Path) -> None:
    async def test(client: EngineClient) -> None:
        folder = make_adapter(tmp_path / "slow", 1)
        (tmp_path / "slow" / GATE).write_text(str(tmp_path / "gate"))
        loading = asyncio.ensure_future(client.load_adapter("slow", folder, owner="me"))
        await asyncio.sleep(0)
        theirs = asyncio.ensure_future(client.unload_adapter("slow", owner=""))
        mine = asyncio.ensure_future(client.unload_adapter("slow", owner="me"))
        await asyncio.sleep(0)
        assert not theirs.done()
        assert not mine.done()
        (tmp_path / "gate").touch()
        await loading
        with pytest.raises(ModelNotFound):
            await theirs
        await mine
        assert client.adapters() == ()
        with pytest.raises(ModelNotFound):
            await answer(client, "late", "slow")

    run(test)


def test_a_snapshot_let_go_while_a_new_engine_gets_it_is_gone_from_it_with_its_folder(tmp_path: Path) -> None:
    @dataclass
    class Serving:
        engine: EngineClient

        def open_door(self) -> NoReturn:
            raise AssertionError("nothing is sampled here")

    async def test(client: EngineClient) -> None:
        gate = tmp_path / "gate"
        gate.touch()

        async def save(folder: Path) -> None:
            make_adapter(folder, 1)
            (folder / GATE).write_text(str(gate))

        snapshots = Snapshots(tmp_path / "snapshots", Serving(client))
        snapshot = await snapshots.make("train-1", save)
        gate.unlink()
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: snapshot.name in client._adapters._busy)  # the new engine is loading it
        snapshot.is_current = False
        letting_go = asyncio.ensure_future(snapshots.release(snapshot))
        await asyncio.sleep(0.05)
        assert snapshot.folder.exists()  # it is being read
        gate.touch()
        await letting_go
        await client.ready()
        assert client.adapters() == ()
        assert not snapshot.folder.exists()
        with pytest.raises(ModelNotFound):
            await answer(client, "late", snapshot.name)

    run(test)


def test_a_caller_that_goes_away_leaves_no_adapter_that_is_not_on_record(tmp_path: Path) -> None:
    async def test(client: EngineClient) -> None:
        folder = make_adapter(tmp_path / "slow", 1)
        (tmp_path / "slow" / GATE).write_text(str(tmp_path / "gate"))
        loading = asyncio.ensure_future(client.load_adapter("slow", folder))
        await asyncio.sleep(0)
        loading.cancel()
        (tmp_path / "gate").touch()
        await until(client.adapters)
        assert await answer(client, "r", "slow") == expected(PROMPT, 8, stop=(), adapter=1)

    run(test)


def test_refusals_name_what_is_wrong_and_change_nothing(tmp_path: Path) -> None:
    async def test(client: EngineClient) -> None:
        good = make_adapter(tmp_path / "good", 1)
        for name in ("", "a b", "a,b", "x" * 257, "ä", "a\n"):
            with pytest.raises(InvalidAdapter, match="no name for an adapter") as nameless:
                await client.load_adapter(name, good)
            assert nameless.value.param == "lora_name"
        with pytest.raises(InvalidAdapter, match="`x` cannot be loaded: there is no folder"):
            await client.load_adapter("x", str(tmp_path / "nowhere"))
        with pytest.raises(ModelNotFound):
            await client.unload_adapter("x")
        await client.load_adapter("a", good, owner="one")
        with pytest.raises(AdapterExists) as refused:
            await client.load_adapter("a", good, owner="one")
        assert refused.value.is_final
        with pytest.raises(AdapterExists):
            await client.load_adapter("a", good, owner="another", replace=True)
        await client.load_adapter("b", good)
        with pytest.raises(QuotaExceeded, match="2 adapters are loaded"):
            await client.load_adapter("c", good)
        assert [(info.name, info.owner) for info in client.adapters()] == [("a", "one"), ("b", "")]
        await client.unload_adapter("a")
        replaced = await client.load_adapter("b", make_adapter(tmp_path / "new", 5), replace=True)
        assert replaced.digest == "digest of 5"
        assert await answer(client, "r", "b") == expected(PROMPT, 8, stop=(), adapter=5)

    run(test, max_cpu_loras=2)


def test_an_engine_without_adapters_says_how_to_have_them(tmp_path: Path) -> None:
    async def test(client: EngineClient) -> None:
        with pytest.raises(InvalidAdapter, match="--enable-lora"):
            await client.load_adapter("a", make_adapter(tmp_path, 1))

    run(test, enable_lora=False)
    assert fake_runner.expected(PROMPT, 3, adapter=1) != fake_runner.expected(PROMPT, 3)
