"""A job's files on the disk: its own while it lives, swept when it has ended or was never made."""

import asyncio
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from working import Run, Work

from server.finetune.folders import Folders

pytestmark = pytest.mark.timeout(180)


def test_deleting_a_file_takes_nothing_from_the_job_that_learns_from_it(run: Run) -> None:
    async def main(work: Work) -> None:
        job = await work.create()
        work.files.delete(job.request.training_file, "me")
        await work.jobs.start()
        await work.succeeded(job)

    run(main, start=False)


def test_adapters_that_go_while_they_are_swept_are_no_failure(tmp_path: Path) -> None:
    """Another server sweeps too."""
    folders = Folders(tmp_path)
    for name in ("ftjob-1", "ftjob-2", "ftjob-3", "ftjob-4", "ftjob-5"):
        folders.made(name, whole=False).mkdir(parents=True)
    asked = []

    def has_ended(job_id: str) -> bool | None:
        asked.append(("ended", job_id))
        if job_id in ("ftjob-1", "ftjob-3"):
            folders.remove_adapter(job_id)
        return {"ftjob-1": True, "ftjob-2": True, "ftjob-3": None, "ftjob-4": None, "ftjob-5": False}[job_id]

    def has_adapter(job_id: str) -> bool:
        asked.append(("adapter", job_id))
        return False

    strays = [path.name for path in folders.stray_adapters(has_ended, has_adapter)]
    # ftjob-1 and 3 are gone by then; ftjob-4, of an unknown job, is young, and ftjob-5, of a live one, is its result.
    assert sorted(strays) == ["ftjob-1", "ftjob-2"]
    for name in ("ftjob-1", "ftjob-2"):  # in the other order, a job that succeeds in between would lose its model
        assert asked.index(("ended", name)) < asked.index(("adapter", name))


def test_orphans_of_crashes_are_swept_when_they_are_old(run: Run, tmp_path: Path) -> None:
    old, young = (tmp_path / "finetune" / "jobs" / name for name in ("ftjob-old", "ftjob-young"))
    for path in (old, young):
        path.mkdir(parents=True, mode=0o700)
    (tmp_path / "finetune").chmod(0o700)
    os.utime(old, (1.0, 1.0))

    async def main(work: Work) -> None:
        await work.succeeded(await work.create(steps=1))

    run(main)
    assert not old.exists()
    assert young.exists()


def test_orphans_that_are_too_young_at_the_start_are_swept_later_though_nobody_asks_for_anything(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.finetune.supervisor.TIDY_SECONDS", 0.1)
    orphan = tmp_path / "finetune" / "jobs" / "ftjob-young"
    orphan.mkdir(parents=True, mode=0o700)
    (tmp_path / "finetune").chmod(0o700)

    async def main(work: Work) -> None:
        assert orphan.exists()
        os.utime(orphan, (1.0, 1.0))
        async with asyncio.timeout(60):
            while orphan.exists():
                await asyncio.sleep(0.02)

    run(main)


def test_what_cannot_be_removed_keeps_nothing_else_from_going(run: Run, tmp_path: Path) -> None:
    async def main(work: Work) -> None:
        first, second = await work.create(), await work.create()
        for job in (first, second):
            work.files.delete(job.request.training_file, "me")
        (work.job_folder(first) / "lock").mkdir()  # cannot be opened as a file
        for job in (first, second):
            await work.jobs.cancel(job.id, "me")
        await work.jobs.supervisor.tidy()
        assert [path.name for path in (tmp_path / "finetune" / "jobs").iterdir()] == [first.id]
        (work.job_folder(first) / "lock").rmdir()
        await work.jobs.supervisor.tidy()
        assert list((tmp_path / "finetune" / "jobs").iterdir()) == []

    run(main, start=False)


def test_what_is_being_removed_already_is_gone_as_well_when_tidying_returns(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = shutil.rmtree

    def remove_slowly(path: Path, **how: Any) -> None:
        time.sleep(0.3)
        remove(path, **how)

    async def main(work: Work) -> None:
        job = await work.create()
        await work.jobs.cancel(job.id, "me")
        monkeypatch.setattr("shutil.rmtree", remove_slowly)
        first = asyncio.create_task(work.jobs.supervisor.tidy())
        await asyncio.sleep(0.1)
        await work.jobs.supervisor.tidy()
        assert not work.job_folder(job).exists()
        await first

    run(main, start=False)


def test_an_adapter_is_on_the_disk_under_its_name_before_anybody_writes_that_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders, synced = Folders(tmp_path), []
    result = tmp_path / "jobs" / "ftjob-1" / "run" / "result"
    result.mkdir(parents=True)
    monkeypatch.setattr("server.finetune.folders.sync_folder", lambda path: synced.append((path, place.exists())))
    place = folders.made("ftjob-1", whole=False)
    for _ in range(2):  # a crash may have come between the rename and the sync
        synced.clear()
        assert folders.keep("ftjob-1", result, whole=False) == place
        assert synced == [(tmp_path / "adapters", True), (tmp_path, True)]
