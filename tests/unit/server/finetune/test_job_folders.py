"""A job's files on the disk: its own while it lives, swept when it has ended or was never made."""

import asyncio
import os
from pathlib import Path

import pytest
from working import at_work, script

from server.finetune import Status
from server.finetune.folders import Folders

pytestmark = pytest.mark.timeout(180)


def test_deleting_a_file_takes_nothing_from_the_job_that_learns_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path, monkeypatch)

    async def main() -> None:
        async with at_work(tmp_path, start=False) as work:
            job = await work.create()
            work.files.delete(job.request.training_file, "me")
            await work.jobs.start()
            assert (await work.until(job, Status.SUCCEEDED, Status.FAILED)).status is Status.SUCCEEDED

    asyncio.run(main())


def test_folders_that_go_while_they_are_swept_are_no_failure(tmp_path: Path) -> None:
    """Another server sweeps too."""
    folders = Folders(tmp_path)
    for name in ("ftjob-1", "ftjob-2", "ftjob-3"):
        for place in (folders.job(name).path, folders.adapter(name)):
            place.mkdir(parents=True)

    def has_ended(job_id: str) -> bool | None:
        if job_id != "ftjob-2":
            folders.remove(job_id)
            folders.remove_adapter(job_id)
        return {"ftjob-1": True, "ftjob-2": True, "ftjob-3": None}[job_id]

    folders.sweep(has_ended, lambda _: False)
    assert list((tmp_path / "jobs").iterdir()) == []
    assert [path.name for path in (tmp_path / "adapters").iterdir()] == ["ftjob-2"]  # of late


def test_orphans_of_crashes_are_swept_when_they_are_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, monkeypatch)
    old, young = (tmp_path / "finetune" / "jobs" / name for name in ("ftjob-old", "ftjob-young"))
    for path in (old, young):
        path.mkdir(parents=True, mode=0o700)
    (tmp_path / "finetune").chmod(0o700)
    os.utime(old, (1.0, 1.0))

    async def main() -> None:
        async with at_work(tmp_path) as work:
            job = await work.create(steps=1)
            await work.until(job, Status.SUCCEEDED)
        assert not old.exists()
        assert young.exists()

    asyncio.run(main())
