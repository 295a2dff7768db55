"""The weights that samples come from: their folders and adapters are gone with whoever needed them."""

import asyncio
import fcntl
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from live_training import SAMPLE, Run, Serving, Work, at_work, script, until

from server.training.snapshots import Snapshots

pytestmark = pytest.mark.timeout(180)


def test_an_adapter_that_loads_while_its_model_is_deleted_does_not_stay(run: Run) -> None:
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
