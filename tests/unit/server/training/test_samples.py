"""Samples come from the weights of their place in the sequence, together, and leave nothing in the engine."""

import asyncio
import fcntl
import os
import shutil
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from live_training import SAMPLE, STEP, Serving, Work, at_work, compute, load, save, script, until
from scripted_engine import Script

from server.errors import EngineUnavailable, InsufficientStorage, InvalidAdapter, TrainingMissing
from server.training import Call, Sample, Sampled, SampledSequence, Saved, Stepped, Unload
from server.training.snapshots import Snapshots

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    script(tmp_path, monkeypatch)

    def run(work: Callable[[Work], Awaitable[None]]) -> None:
        async def main() -> None:
            async with at_work(tmp_path) as at:
                await work(at)

        asyncio.run(main())

    return run


def test_a_sample_has_tokens_their_logprobs_and_the_reason_of_its_end(run: Callable[..., None]) -> None:
    async def main(work: Work) -> None:
        model = await work.create()
        work.engine.script = Script(text=b"hello")
        (cut,) = await work.do(model, replace_sample(max_tokens=3))
        assert cut == Sampled((SampledSequence(tuple(b"hel"), (-0.5,) * 3, "length"),))
        (whole,) = await work.do(model, replace_sample(max_tokens=9))
        assert whole.sequences[0] == SampledSequence((*b"hello", 260), (-0.5,) * 6, "stop")  # what stopped it, too
        (stopped,) = await work.do(model, replace_sample(max_tokens=9, stop=("ll",)))
        assert stopped.sequences[0] == SampledSequence(tuple(b"hell"), (-0.5,) * 4, "stop")

    run(main)


def replace_sample(**changes: Any) -> Sample:
    return msgspec.structs.replace(SAMPLE, **changes)


def test_samples_of_a_call_are_one_batch_with_seeds_of_their_own(run: Callable[..., None]) -> None:
    async def main(work: Work) -> None:
        model = await work.create(salt=b"mine")
        (result,) = await work.do(model, replace_sample(num_samples=3, seed=7, temperature=0.5, top_k=4))
        assert len(result.sequences) == 3
        requests = work.engine.requests
        assert [request.sampling.seed for request in requests] == [7, 8, 9]
        assert {request.cache_salt for request in requests} == {b"mine"}
        assert {
            (request.sampling.temperature, request.sampling.top_k, request.sampling.logprobs) for request in requests
        } == {(0.5, 4, 0)}
        assert len({request.request_id for request in requests}) == 3
        assert work.door.reserved == 0

    run(main)


def test_a_sample_keeps_the_weights_it_began_with_while_training_goes_on(run: Callable[..., None]) -> None:
    async def main(work: Work) -> None:
        model = await work.create()
        work.engine.script = Script(hold_after=1)
        first, second = work.submit(model, SAMPLE, SAMPLE)
        (stepped,) = await work.do(model, STEP)  # the samples run, and do not hold up the sequence
        assert stepped == Stepped(2.5, 1)
        await until(lambda: len(work.engine.held) == 2)
        (third,) = work.submit(model, SAMPLE)
        await until(lambda: len(work.engine.held) == 3)
        assert (first.outcome, second.outcome) == (None, None)
        adapters = [request.adapter for request in work.engine.requests]
        assert adapters[0] == adapters[1] != adapters[2]
        assert set(work.engine.infos) == {adapters[0], adapters[2]}  # the old one is still in use
        folders = [Path(info.folder) for info in work.engine.infos.values()]
        assert [(folder / "steps").read_text() for folder in folders] == ["0", "1"]
        assert {info.owner for info in work.engine.infos.values()}.isdisjoint({"", "me"})
        work.engine.resume.set()
        for future in (first, second, third):
            assert isinstance(await work.outcome(future), Sampled)
        await until(lambda: set(work.engine.infos) == {adapters[2]})  # and gone with its last sample
        await until(lambda: not folders[0].exists())
        assert folders[1].exists()
        work.engine.resume.clear()

    run(main)


@pytest.mark.parametrize("unchanged", [save(), compute(), compute(backward=False)])
def test_calls_that_change_no_weights_cost_no_new_adapter(run: Callable[..., None], unchanged: Call) -> None:
    async def main(work: Work) -> None:
        model = await work.create()
        await work.do(model, SAMPLE, unchanged, SAMPLE)
        adapters = {request.adapter for request in work.engine.requests}
        assert len(adapters) == 1

    run(main)


def test_loaded_weights_are_sampled_from(run: Callable[..., None]) -> None:
    async def main(work: Work) -> None:
        model = await work.create()
        await work.do(model, SAMPLE, save(), load(model), SAMPLE)
        adapters = {request.adapter for request in work.engine.requests}
        assert len(adapters) == 2

    run(main)


@pytest.mark.parametrize("end", ["unload", "delete", "kill"])
def test_a_model_that_ends_leaves_no_adapter(run: Callable[..., None], end: str) -> None:
    async def main(work: Work) -> None:
        model = await work.create()
        await work.do(model, SAMPLE)
        assert len(work.engine.infos) == 1
        (folder,) = [Path(info.folder) for info in work.engine.infos.values()]
        if end == "unload":
            await work.do(model, Unload())
        elif end == "delete":
            await work.training.delete(model)
        else:
            assert work.pid is not None
            os.kill(work.pid, 9)
        await until(lambda: not work.engine.infos and not folder.exists())

    run(main)


def test_unloading_waits_for_samples_before_it(run: Callable[..., None]) -> None:
    async def main(work: Work) -> None:
        model = await work.create()
        work.engine.script = Script(hold_after=1)
        sampled, unloaded = work.submit(model, SAMPLE, Unload())
        await until(lambda: work.engine.held)
        assert (sampled.outcome, unloaded.outcome) == (None, None)
        work.engine.resume.set()
        assert isinstance(await work.outcome(sampled), Sampled)
        await work.outcome(unloaded)
        work.engine.resume.clear()

    run(main)


def test_what_the_engine_refuses_is_told_and_the_model_goes_on(run: Callable[..., None]) -> None:
    async def main(work: Work) -> None:
        model = await work.create()
        work.engine.refusal = InvalidAdapter("It cannot be loaded.")
        (refused,) = await work.do(model, SAMPLE)
        assert refused is work.engine.refusal
        work.engine.refusal = None
        work.engine.script = Script(fail_after=1)
        (failed,) = await work.do(model, replace_sample(num_samples=2))
        assert isinstance(failed, EngineUnavailable)
        assert work.door.reserved == 0
        work.engine.script = Script()
        assert isinstance((await work.do(model, SAMPLE))[0], Sampled)

    run(main)


def test_a_data_folder_that_cannot_be_used_is_told_and_the_model_goes_on(
    run: Callable[..., None], tmp_path: Path
) -> None:
    async def main(work: Work) -> None:
        model = await work.create()
        place = tmp_path / "training" / "snapshots"
        place.parent.mkdir(exist_ok=True)
        place.touch()  # no folder
        refused, stepped = await work.do(model, SAMPLE, STEP)
        assert isinstance(refused, InsufficientStorage)
        assert stepped == Stepped(2.5, 1)
        place.unlink()
        (sampled,) = await work.do(model, SAMPLE)
        assert isinstance(sampled, Sampled)

    run(main)


def test_an_adapter_that_loads_while_its_model_is_deleted_does_not_stay(run: Callable[..., None]) -> None:
    async def main(work: Work) -> None:
        load_now, loading = asyncio.Event(), asyncio.Event()
        load_adapter = work.engine.load_adapter

        async def load_slowly(*arguments: Any, **options: Any) -> Any:
            loading.set()
            await load_now.wait()
            return await load_adapter(*arguments, **options)

        work.engine.load_adapter = load_slowly  # type: ignore[method-assign]
        model = await work.create()
        work.submit(model, SAMPLE)
        await loading.wait()
        await work.training.delete(model)
        load_now.set()
        folder = work.folder / "training" / "snapshots"
        await until(lambda: not work.engine.infos and not list(folder.glob("*/train-*")))

    run(main)


def test_served_weights_are_their_owners_models_also_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path, monkeypatch)

    async def main() -> None:
        async with at_work(tmp_path) as work:
            model = await work.create()
            saved, _, kept = await work.do(
                model, save("a", kind="sampler_weights", serve=True), save("b"), save("c", serve=True)
            )
            assert {name: info.owner for name, info in work.engine.infos.items()} == {saved.path: "me", kept.path: "me"}
            await work.do(model, save("c", overwrite=True))  # no longer served
            assert set(work.engine.infos) == {saved.path}
        async with at_work(tmp_path) as work:
            assert {name: info.owner for name, info in work.engine.infos.items()} == {saved.path: "me"}
            await work.training.delete_weights(saved.path, "me")
            assert work.engine.infos == {}
            with pytest.raises(TrainingMissing):
                await work.training.delete_weights(saved.path, "me")

    asyncio.run(main())


def test_weights_that_cannot_be_served_are_not_kept(run: Callable[..., None]) -> None:
    async def main(work: Work) -> None:
        model = await work.create()
        work.engine.refusal = InvalidAdapter("It cannot be loaded.")
        (refused,) = await work.do(model, save(kind="sampler_weights", serve=True))
        assert refused is work.engine.refusal
        assert await work.training.saved("me") == []
        work.engine.refusal = None
        (saved,) = await work.do(model, save(kind="sampler_weights", serve=True))
        assert isinstance(saved, Saved)

    run(main)


def test_folders_of_servers_that_are_no_more_are_swept_and_those_of_others_are_not(tmp_path: Path) -> None:
    async def main() -> None:
        async def write(folder: Path) -> None:
            folder.mkdir()

        root = tmp_path / "snapshots"
        living, starting = Snapshots(root, Serving()), Snapshots(root, Serving())
        snapshot = await living.make("train-1", write)
        dead = root / "server-dead"
        shutil.copytree(snapshot.folder.parent, dead)
        starting.sweep()
        assert snapshot.folder.exists()
        assert not dead.exists()
        living.close()
        assert [path.name for path in root.iterdir()] == ["lock"]

    asyncio.run(main())


def test_what_a_killed_server_had_half_removed_is_swept(tmp_path: Path) -> None:
    """Its lock may have gone first."""
    root = tmp_path / "snapshots"
    (root / "server-half" / "train-1-1").mkdir(parents=True)
    root.chmod(0o700)
    Snapshots(root, Serving()).sweep()
    assert not (root / "server-half").exists()


def test_a_folder_that_is_being_made_is_not_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "snapshots"
    starting, sweeping = Snapshots(root, Serving()), Snapshots(root, Serving())
    flock, swept = fcntl.flock, threading.Thread(target=sweeping.sweep)

    def flock_late(descriptor: int, operation: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().parent.name.startswith("server-") and not swept.ident:
            swept.start()  # between the lock's making and its taking
            swept.join(0.3)
        flock(descriptor, operation)

    async def main() -> None:
        async def write(folder: Path) -> None:
            folder.mkdir()

        monkeypatch.setattr(fcntl, "flock", flock_late)
        snapshot = await starting.make("train-1", write)
        swept.join()
        assert snapshot.folder.exists()
        starting.close()

    asyncio.run(main())


@pytest.mark.parametrize("end", ["delete", "kill"])
def test_weights_that_were_being_written_for_a_sample_go_with_their_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    script(tmp_path, monkeypatch)

    async def main() -> None:
        async with at_work(tmp_path) as work:
            model = await work.create()
            place = tmp_path / "training" / "snapshots"
            script(tmp_path, monkeypatch, **({"die_at": "written"} if end == "kill" else {"hold": "Save"}))
            work.submit(model, SAMPLE)
            await until(lambda: work.log()[-1].endswith(" Save"))
            if end == "delete":
                deleting = asyncio.create_task(work.training.delete(model))
                await until(lambda: model.end is not None)
                (tmp_path / "go").touch()
                await deleting
            await until(lambda: work.pid is None)
            await until(lambda: not [*place.glob("*/train-*"), *place.glob("*/.train-*")])
            assert len(list(place.glob("server-*/lock"))) == 1  # there was a place for them

    asyncio.run(main())
