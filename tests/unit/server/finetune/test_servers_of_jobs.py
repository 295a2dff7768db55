"""Jobs of servers that drain, close, are killed, lose a lease, or are two."""

import asyncio
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from working import LIMIT, Run, Work, at_work, is_running, script

from models.training import TrainingPlan
from server.finetune import Job, Status
from server.finetune.database import connect
from server.finetune.folders import JobFolder
from server.finetune.leases import TRAIN, Killed, Leases, Stage
from server.finetune.setbacks import MAX_CRASHES
from server.finetune.store import JobStore

pytestmark = pytest.mark.timeout(180)


def test_a_drain_stops_at_a_checkpoint_and_the_next_server_goes_on(run: Run, truth: str) -> None:
    async def first(work: Work) -> None:
        job = await work.create()
        await work.trainer(job, step=3)
        draining = asyncio.create_task(work.jobs.drain())
        await asyncio.sleep(0)
        work.go_on()
        await draining
        assert work.trainer_pid is None
        left = await work.jobs.get(job.id, "me")
        assert (left.status, left.crashes) == (Status.QUEUED, 0)

    async def second(work: Work) -> None:
        (job,) = await work.jobs.page("me", None, 9, {})
        done = await work.succeeded(job)
        assert work.weights(done) == truth
        assert len(work.trained()) == 6
        assert "crash" not in " ".join(await work.said(job))

    run(first, {"hold_at": 4})
    run(second)


@pytest.mark.parametrize("status", [Status.QUEUED, Status.PAUSED])
def test_nobody_waits_for_a_trainer_that_still_loads_its_model(run: Run, truth: str, status: Status) -> None:
    """It has nothing to keep, and may load for minutes."""

    async def main(work: Work) -> None:
        job = await work.create()
        await work.wait(job, lambda _: (work.folder / "holds").exists())
        pid = work.trainer_pid
        if status is Status.PAUSED:
            await work.jobs.pause(job.id, "me")
        else:
            await work.jobs.drain()
        await work.wait(job, lambda now: now.status is status and work.trainer_pid is None)
        assert pid is not None
        assert not is_running(pid)
        assert work.jobs.stats.crashes == 0

    run(main, {"hold_at": 0})

    async def goes_on(work: Work) -> None:
        (job,) = await work.jobs.page("me", None, 1, {})
        if status is Status.PAUSED:
            await work.jobs.resume(job.id, "me")
        await work.succeeded(job)
        assert work.weights(job) == truth

    run(goes_on)


def test_a_server_that_closes_without_a_drain_leaves_no_process_and_no_lease(run: Run) -> None:
    trainers: list[int] = []

    async def first(work: Work) -> None:
        trainers.append(await work.trainer(await work.create(), step=2))

    async def second(work: Work) -> None:
        (job,) = await work.jobs.page("me", None, 9, {})
        assert job.status is Status.QUEUED

    run(first, {"hold_at": 3})
    (pid,) = trainers
    assert not is_running(pid)
    run(second, start=False)


def test_a_server_that_closes_while_it_takes_up_a_job_gives_it_back(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    claim, taken, ended = Leases.claim, threading.Event(), threading.Event()

    def claim_slowly(leases: Leases, stage: Stage, *asked: Any) -> Job | Killed | None:
        job = claim(leases, stage, *asked)
        if job is not None and stage is TRAIN:
            taken.set()
            ended.wait(LIMIT)
        return job

    async def first(work: Work) -> None:
        await work.create()
        await asyncio.to_thread(taken.wait, LIMIT)
        close = asyncio.create_task(work.jobs.supervisor.close())
        await asyncio.sleep(0)  # until it has begun
        ended.set()
        await close

    async def second(work: Work) -> None:
        (job,) = await work.jobs.page("me", None, 9, {})
        assert job.status is Status.QUEUED
        await work.jobs.start()
        await work.succeeded(job)
        assert "crash" not in " ".join(await work.said(job))

    with monkeypatch.context() as patch:
        patch.setattr(Leases, "claim", claim_slowly)
        run(first)
    run(second, start=False)


def test_kills_that_the_next_server_finds_are_counted(run: Run, tmp_path: Path) -> None:
    async def main(work: Work) -> None:
        lost, given_up = await work.create(), await work.create()
        with closing(connect(tmp_path / "finetune" / "jobs.sqlite3")) as jobs:
            jobs.execute("UPDATE jobs SET holder = 'dead', lease_until = 1")
            jobs.execute("UPDATE jobs SET crashes = ? WHERE id = ?", (MAX_CRASHES - 1, given_up.id))
        await work.jobs.start()
        assert (await work.failed(given_up)).failure.code == "trainer_crashed"
        await work.succeeded(lost)
        assert work.jobs.stats.crashes == 2
        assert work.jobs.stats.ended == Counter({"failed": 1, "succeeded": 1})

    run(main, start=False)


def test_a_server_that_is_closed_while_it_drains_waits_for_no_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer stands still and would count as hung after two minutes. Whoever watches it is told of the drain in
    the moment in which its own end is asked for."""
    script(tmp_path, monkeypatch, hold_at=1)

    async def main() -> None:
        async with asyncio.timeout(LIMIT), at_work(tmp_path, silence_limit=math.inf) as work:
            await work.told(await work.create(), "Fine-tuning job started")
            pid = work.trainer_pid
            assert pid is not None
            draining = asyncio.create_task(work.jobs.drain())
            await asyncio.sleep(0)
        await draining
        assert not is_running(pid)

    asyncio.run(main())


@pytest.mark.parametrize("wanted", [True, False])
def test_jobs_repeat_bit_for_bit_on_a_gpu_where_the_server_says_so(run: Run, wanted: bool) -> None:
    async def main(work: Work) -> None:
        done = await work.succeeded(await work.create(steps=1))
        assert done.plan is not None
        assert TrainingPlan.from_json(done.plan).deterministic is wanted
        assert (work.folder / "environment").read_text().startswith(":4096:8 expandable_segments:True ")

    run(main, deterministic=wanted)


@pytest.mark.parametrize(
    ("operators", "trainers"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "unset")],
)
def test_threads_of_a_trainer_do_not_spin_for_long_unless_the_operator_says_so(
    run: Run, monkeypatch: pytest.MonkeyPatch, operators: dict[str, str], trainers: str
) -> None:
    """Where another process keeps a core busy, threads that spin keep those waiting for which they wait."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in operators.items():
        monkeypatch.setenv(name, value)

    async def main(work: Work) -> None:
        await work.succeeded(await work.create(steps=1))
        assert (work.folder / "environment").read_text().split()[-1] == trainers

    run(main)


def test_two_servers_share_the_jobs_and_train_every_step_once(run: Run, tmp_path: Path) -> None:
    async def main(one: Work) -> None:
        async with at_work(tmp_path) as other:
            jobs = [await (one if number % 2 else other).create(steps=3) for number in range(6)]
            for job in jobs:
                await one.succeeded(job)
            assert Counter(one.trained()) == Counter(f"{job.id} {step}" for job in jobs for step in (1, 2, 3))
            assert len({name for name, _, _ in one.loaded + other.loaded}) == 6

    run(main)


def test_a_server_whose_lease_was_taken_ends_its_trainer_and_writes_nothing(run: Run, tmp_path: Path) -> None:
    async def main(work: Work) -> None:
        job = await work.create()
        pid = await work.trainer(job, step=2)
        store = JobStore(tmp_path / "finetune" / "jobs.sqlite3")  # as another server that finds the lease lapsed
        later = time.time() + 1000
        thief = Leases(store, "thief", 10_000.0, back_off=0.0, is_gone=lambda _: False)
        assert thief.claim(TRAIN, "base", later) == Killed(failed=False)
        taken = thief.claim(TRAIN, "base", later)
        assert taken is not None
        before = len(store.journal.events(job.id, after=0, before=None, limit=1000))
        await work.wait(job, lambda _: not is_running(pid))
        assert len(store.journal.events(job.id, after=0, before=None, limit=1000)) == before
        assert store.get(job.id).attempt == taken.attempt
        store.close()

    run(main, {"hold_at": 3})


def test_a_job_in_whose_folder_somebody_works_waits_without_a_crash(run: Run, tmp_path: Path) -> None:
    """A trainer that was stopped, lost its lease and was not killed yet."""

    async def main(work: Work) -> None:
        job = await work.create()
        await work.jobs.pause(job.id, "me")
        with JobFolder(work.job_folder(job)).alone() as alone:
            assert alone
            await work.jobs.resume(job.id, "me")
            attempts = (await work.jobs.get(job.id, "me")).attempt
            await work.wait(job, lambda now: now.attempt >= attempts + 2)  # it tried, and tries again
            assert (await work.jobs.get(job.id, "me")).crashes == 0
            assert not (tmp_path / "trained").exists()
        await work.succeeded(job)

    run(main, lease_seconds=1.0)


@contextmanager
def another_server(folder: Path, lease_seconds: float) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """A process of its own, killed at the end; its job, and that one's trainer, which has trained two steps."""
    command = [sys.executable, str(Path(__file__).parent / "killed_server.py"), str(folder), str(lease_seconds)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        job_id, trainer = server.stdout.readline().split()
        try:
            yield server, job_id, int(trainer)
        finally:
            server.kill()


def make_stand_still(server: subprocess.Popen[str], folder: Path) -> None:
    """Until its lease has lapsed. Not in the midst of a transaction, which would keep everybody else from the jobs."""
    with closing(connect(folder / "finetune" / "jobs.sqlite3")) as jobs:
        jobs.execute("BEGIN IMMEDIATE")
        server.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, server.pid, os.WSTOPPED)
        jobs.execute("UPDATE jobs SET lease_until = 0")
        jobs.execute("COMMIT")


def ended(pid: int) -> bool:
    deadline = time.monotonic() + LIMIT
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)  # between two looks
    return not is_running(pid)


def test_the_trainer_dies_with_its_server_and_the_next_one_waits_for_no_lease(
    run: Run, truth: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 of the whole server, whose lease would last for days."""
    script(tmp_path, monkeypatch, hold_at=3)
    with another_server(tmp_path, lease_seconds=1e6) as (_, job_id, trainer):
        pass
    assert ended(trainer)

    async def main(work: Work) -> None:
        job = await work.jobs.get(job_id, "me")
        assert job.status is Status.RUNNING
        assert work.weights(await work.succeeded(job)) == truth

    run(main)
    connect(tmp_path / "finetune" / "jobs.sqlite3").close()  # whole


def test_a_server_that_stands_still_loses_its_job_by_its_lease_and_trains_nothing_twice(
    run: Run, truth: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path, monkeypatch, hold_at=3)
    with another_server(tmp_path, lease_seconds=1e6) as (server, job_id, trainer):
        make_stand_still(server, tmp_path)  # and not its trainer, which holds the job's folder

        async def main(work: Work) -> None:
            job = await work.jobs.get(job_id, "me")
            await work.wait(  # taken, and left to who works in the folder
                job, lambda now: now.attempt == job.attempt + 1 and now.status is Status.QUEUED
            )
            assert is_running(trainer)
            assert len(work.trained()) == 2
            server.send_signal(signal.SIGCONT)
            await work.wait(job, lambda _: not is_running(trainer))
            work.go_on()
            await work.jobs.pause(job.id, "me")
            await work.jobs.resume(job.id, "me")  # and waits no longer
            assert work.weights(await work.succeeded(job)) == truth
            assert Counter(work.trained()) == Counter(f"{job_id} {step}" for step in range(1, 7))

        run(main, {"hold_at": 3}, lease_seconds=1e6)


def test_a_model_that_another_server_makes_is_served_until_that_one_deletes_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.finetune.supervisor.SERVE_SECONDS", 0.05)

    async def main(one: Work) -> None:
        async with at_work(tmp_path) as other:
            job = await one.succeeded(await one.create(steps=1))
            name = str(job.fine_tuned_model)
            for work in (one, other):
                await work.wait(job, lambda _, work=work: [served for served, _, _ in work.loaded] == [name])
            adapter = await one.jobs.adapter(name)
            assert adapter is not None
            await one.jobs.remove_adapter(adapter)
            await other.wait(job, lambda _: not other.loaded)

    run(main)
