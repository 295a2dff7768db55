"""Jobs of servers that drain, close, are killed, lose a lease, or are two."""

import asyncio
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from working import at_work, is_running, script, trained, uninterrupted

from server.finetune import Status
from server.finetune.database import connect
from server.finetune.folders import JobFolder
from server.finetune.leases import TRAIN, Leases
from server.finetune.store import JobStore

pytestmark = pytest.mark.timeout(180)


def test_a_drain_stops_at_a_checkpoint_and_the_next_server_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = uninterrupted(tmp_path, monkeypatch)
    go = script(tmp_path, monkeypatch, hold_at=4)

    async def first() -> str:
        async with at_work(tmp_path) as work:
            job = await work.create()
            await work.told(job, "Step 3/6")
            draining = asyncio.create_task(work.jobs.drain())
            await asyncio.sleep(0)
            go.touch()
            await draining
            assert work.trainer_pid is None
            left = await work.jobs.get(job.id, "me")
            assert (left.status, left.crashes) == (Status.QUEUED, 0)
            return job.id

    async def second(job_id: str) -> None:
        async with at_work(tmp_path) as work:
            job = await work.jobs.get(job_id, "me")
            done = await work.until(job, Status.SUCCEEDED, Status.FAILED)
            assert work.weights(done) == truth
            assert len(trained(tmp_path)) == 6
            assert "crash" not in " ".join(await work.said(job))

    asyncio.run(second(asyncio.run(first())))


def test_a_server_that_closes_without_a_drain_leaves_no_process_and_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path, monkeypatch, hold_at=3)

    async def main() -> None:
        async with at_work(tmp_path) as work:
            job = await work.create()
            await work.told(job, "Step 2/6")
            pid = work.trainer_pid
        assert pid is not None
        assert not is_running(pid)
        async with at_work(tmp_path, start=False) as work:
            assert (await work.jobs.get(job.id, "me")).status is Status.QUEUED

    asyncio.run(main())


def test_two_servers_share_the_jobs_and_train_every_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, monkeypatch)

    async def main() -> None:
        async with at_work(tmp_path) as one, at_work(tmp_path) as other:
            jobs = [await (one if number % 2 else other).create(steps=3) for number in range(6)]
            for job in jobs:
                assert (await one.until(job, Status.SUCCEEDED, Status.FAILED)).status is Status.SUCCEEDED
            assert Counter(trained(tmp_path)) == Counter(f"{job.id} {step}" for job in jobs for step in (1, 2, 3))
            assert len(one.loaded) + len(other.loaded) == 6

    asyncio.run(main())


def test_a_server_whose_lease_was_taken_ends_its_trainer_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path, monkeypatch, hold_at=3)

    async def main() -> None:
        async with at_work(tmp_path) as work:
            job = await work.create()
            await work.told(job, "Step 2/6")
            pid = work.trainer_pid
            assert pid is not None
            store = JobStore(tmp_path / "finetune" / "jobs.sqlite3")  # as another server that finds the lease lapsed
            later = time.time() + 1000
            thief = Leases(store, "thief", 10_000.0, back_off=0.0)
            assert thief.claim(TRAIN, "base", later) is None
            taken = thief.claim(TRAIN, "base", later)
            assert taken is not None
            before = len(store.journal.events(job.id, after=0, before=None, limit=1000))
            await work.wait(job, lambda _: not is_running(pid))
            assert len(store.journal.events(job.id, after=0, before=None, limit=1000)) == before
            assert store.get(job.id).attempt == taken.attempt
            store.close()

    asyncio.run(main())


def test_a_job_in_whose_folder_somebody_works_waits_without_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that was stopped, lost its lease and was not killed yet."""
    script(tmp_path, monkeypatch)

    async def main() -> None:
        async with at_work(tmp_path, lease_seconds=1.0) as work:
            job = await work.create()
            await work.jobs.pause(job.id, "me")
            with JobFolder(work.job_folder(job)).alone() as alone:
                assert alone
                await work.jobs.resume(job.id, "me")
                attempts = (await work.jobs.get(job.id, "me")).attempt
                await work.wait(job, lambda now: now.attempt >= attempts + 2)  # it tried, and tries again
                assert (await work.jobs.get(job.id, "me")).crashes == 0
                assert not (tmp_path / "trained").exists()
            assert (await work.until(job, Status.SUCCEEDED, Status.FAILED)).status is Status.SUCCEEDED

    asyncio.run(main())


def test_the_trainer_dies_with_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9 of the whole server: its trainer goes too, and the next server takes the job up when the lease lapses."""
    truth = uninterrupted(tmp_path, monkeypatch)
    script(tmp_path, monkeypatch, hold_at=3)
    command = [sys.executable, str(Path(__file__).parent / "killed_server.py"), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        job_id, trainer = server.stdout.readline().split()
        server.kill()
    deadline = time.monotonic() + 20
    while is_running(int(trainer)) and time.monotonic() < deadline:
        time.sleep(0.02)  # between two looks
    assert not is_running(int(trainer))
    script(tmp_path, monkeypatch)

    async def main() -> None:
        async with at_work(tmp_path) as work:
            job = await work.jobs.get(job_id, "me")
            assert job.status is Status.RUNNING
            done = await work.until(job, Status.SUCCEEDED, Status.FAILED)
            assert done.status is Status.SUCCEEDED
            assert work.weights(job) == truth

    asyncio.run(main())
    connect(tmp_path / "finetune" / "jobs.sqlite3").close()  # whole
