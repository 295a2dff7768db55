"""Jobs from creation to their end, through real processes that are killed, stopped and drained."""

import asyncio
import contextlib
import os
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from working import PAIR, at_work, put, script, trained

from server.errors import InvalidAdapter, InvalidFile, InvalidRequest
from server.finetune import Hyperparameters, JobRequest, Status
from server.finetune.database import connect
from server.finetune.folders import Folders, JobFolder
from server.finetune.journal import Journal
from server.finetune.leases import MAX_CRASHES, TRAIN, Leases
from server.finetune.store import JobStore
from server.finetune.worker import NICENESS, OOM_SCORE

pytestmark = pytest.mark.timeout(180)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def uninterrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The weights of the same job when nothing happens to it."""
    folder = tmp_path / "uninterrupted"
    folder.mkdir()
    script(folder, monkeypatch)

    async def main() -> str:
        async with at_work(folder) as work:
            job = await work.until(await work.create(), Status.SUCCEEDED, Status.FAILED)
            return work.weights(job)

    return asyncio.run(main())


def test_a_job_succeeds_and_leaves_a_model_metrics_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path, monkeypatch)

    async def main() -> None:
        async with at_work(tmp_path) as work:
            job = await work.create(suffix="mine", metadata={"a": "b"})
            assert job.status is Status.VALIDATING
            done = await work.until(job, Status.SUCCEEDED, Status.FAILED)
            assert (done.status, done.trained_tokens, done.total_steps) == (Status.SUCCEEDED, 60, 6)
            assert done.fine_tuned_model == f"ft:base:mine:{job.id[6:18]}"
            assert done.finished_at is not None
            assert work.loaded == [(done.fine_tuned_model, tmp_path / "finetune" / "adapters" / job.id, "me")]
            assert done.result_file is not None
            stored, opened = work.files.read(done.result_file, "me")
            with opened:
                rows = opened.read().decode().splitlines()
            assert (stored.purpose, stored.filename, stored.form) == ("fine-tune-results", f"{job.id}.csv", None)
            assert rows[0].startswith("step,train_loss,train_accuracy,valid_loss")
            assert rows[2] == "2,1,0.5,,,0.0001"
            assert len(rows) == 7
            said = await work.said(job)
            assert [text.partition(":")[0] for text in said] == [
                "Created fine-tuning job", "Validating training file", "4 training examples, 8 tokens, the longest 2",
                "Files validated, moving job to queued state", "Fine-tuning job started on cpu", "Step 1/6", "Step 2/6",
                "Checkpoint created at step 2", "Step 3/6", "Step 4/6", "Checkpoint created at step 4", "Step 5/6",
                "Step 6/6", "Checkpoint created at step 6", "New fine-tuned model created",
                "The job has successfully completed",
            ]  # fmt: skip
            await work.wait(job, lambda _: not work.job_folder(job).exists())
            await work.wait(job, lambda _: work.jobs.stats.jobs["succeeded"] == 1)
            assert (work.jobs.stats.steps, work.jobs.stats.tokens) == (6, 60)
            assert work.jobs.stats.ended == Counter({"succeeded": 1})

    asyncio.run(main())


@pytest.mark.parametrize("step", [1, 4, 5])
def test_a_trainer_that_is_killed_is_followed_by_one_that_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    truth = uninterrupted(tmp_path, monkeypatch)
    script(tmp_path, monkeypatch, signal_at=step, signal="SIGKILL")

    async def main() -> None:
        async with at_work(tmp_path) as work:
            job = await work.create()
            done = await work.until(job, Status.SUCCEEDED, Status.FAILED)
            assert done.status is Status.SUCCEEDED
            assert work.weights(job) == truth
            said = await work.said(job)
            assert sum("The trainer was killed (SIGKILL" in text for text in said) == 1
            assert sum(text.startswith("Step ") for text in said) == 6
            assert work.jobs.stats.crashes == 1
            counts = Counter(trained(tmp_path))
            assert max(counts.values()) <= 2  # at most checkpoint_every steps are done again
            assert sum(counts.values()) <= 6 + 2

    asyncio.run(main())


def test_a_job_that_kills_every_trainer_fails_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, monkeypatch, signal_at=3, signal="SIGKILL", always=True)

    async def main() -> None:
        async with at_work(tmp_path) as work:
            job = await work.create()
            failed = await work.until(job, Status.SUCCEEDED, Status.FAILED)
            assert failed.failure is not None
            assert failed.failure.code == "trainer_crashed"
            assert f"crashed {MAX_CRASHES} times" in failed.failure.message
            assert "SIGKILL" in failed.failure.message
            other = await work.create(steps=2)  # the next job is none the worse
            assert (await work.until(other, Status.SUCCEEDED, Status.FAILED)).status is Status.SUCCEEDED
            await work.wait(job, lambda _: not work.job_folder(job).exists())

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        ("diverged", "training_diverged", "the gradient was not finite"),
        ("full", "trainer_crashed", "The server's disk is full"),
        ("full for a checkpoint", "trainer_crashed", "The server's disk is full"),
        ("unsupported", "unsupported_model", "cannot be trained on this server: TinyForCausalLM fails the self-test"),
    ],
)
def test_what_a_trainer_says_of_its_end_is_the_jobs_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, code: str, told: str
) -> None:
    script(tmp_path, monkeypatch, raise_at=3, error=error)

    async def main() -> None:
        async with at_work(tmp_path) as work:
            failed = await work.until(await work.create(), Status.SUCCEEDED, Status.FAILED)
            assert failed.failure is not None
            assert failed.failure.code == code
            assert told in failed.failure.message
            assert failed.crashes == (MAX_CRASHES - 1 if code == "trainer_crashed" else 0)

    asyncio.run(main())


def test_a_bad_file_fails_before_it_waits_for_a_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, monkeypatch, hold_at=1)

    async def main() -> None:
        async with at_work(tmp_path) as work:
            running = await work.create()
            await work.until(running, Status.RUNNING)
            bad = await work.create(PAIR + b'{"prompt": "a", "completion": "bad"}\n')
            failed = await work.until(bad, Status.FAILED)
            assert failed.failure is not None
            assert (failed.failure.code, failed.failure.param) == ("invalid_training_file", "training_file")
            assert failed.failure.message == "Line 2: it is bad."
            assert (await work.jobs.get(running.id, "me")).status is Status.RUNNING

    asyncio.run(main())


def test_a_paused_job_keeps_a_checkpoint_and_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = uninterrupted(tmp_path, monkeypatch)
    go = script(tmp_path, monkeypatch, hold_at=3)

    async def main() -> None:
        async with at_work(tmp_path) as work:
            job = await work.create()
            await work.told(job, "Step 2/6")
            pid = work.trainer_pid
            assert pid is not None
            assert (await work.jobs.pause(job.id, "me")).status is Status.PAUSED
            go.touch()
            await work.wait(job, lambda _: not is_running(pid))
            steps = len(trained(tmp_path))
            assert steps < 6
            assert (await work.jobs.get(job.id, "me")).status is Status.PAUSED
            await work.jobs.resume(job.id, "me")
            await work.until(job, Status.SUCCEEDED)
            assert work.weights(job) == truth
            assert len(trained(tmp_path)) == 6  # nothing was done twice

    asyncio.run(main())


def test_a_cancelled_job_ends_at_once_and_says_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, monkeypatch, hold_at=3)

    async def main() -> None:
        async with at_work(tmp_path) as work:
            job = await work.create()
            await work.told(job, "Step 2/6")
            pid = work.trainer_pid
            assert pid is not None
            assert (await work.jobs.cancel(job.id, "me")).status is Status.CANCELLED
            await work.wait(job, lambda _: not is_running(pid) and not work.job_folder(job).exists())
            assert (await work.said(job))[-1] == "The job was cancelled"
            assert work.loaded == []

    asyncio.run(main())


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


def test_a_trainer_that_stands_still_is_killed_and_followed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path, monkeypatch, signal_at=3, signal="SIGSTOP")

    async def main() -> None:
        async with at_work(tmp_path, silence_limit=4.0) as work:
            job = await work.create()
            done = await work.until(job, Status.SUCCEEDED, Status.FAILED)
            assert done.status is Status.SUCCEEDED
            assert any("The trainer did not answer any more" in text for text in await work.said(job))

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


def test_the_trainer_yields_to_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, monkeypatch, hold_at=2)

    async def main() -> None:
        async with at_work(tmp_path) as work:
            job = await work.create()
            await work.told(job, "Step 1/6")
            pid = work.trainer_pid
            assert pid is not None
            assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
            assert int(Path(f"/proc/{pid}/oom_score_adj").read_text()) == OOM_SCORE
            await work.jobs.cancel(job.id, "me")

    asyncio.run(main())


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


def test_a_full_disk_stops_the_trainer_and_the_job_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = uninterrupted(tmp_path, monkeypatch)
    script(tmp_path, monkeypatch)
    record, refusals = Journal.record, []

    def full(journal: Journal, job_id: str, now: float, step: object, total: int) -> bool:
        if getattr(step, "step", 0) == 4 and len(refusals) < 2:
            refusals.append(step)
            raise sqlite3.OperationalError("database or disk is full")
        return record(journal, job_id, now, step, total)  # type: ignore[arg-type]

    monkeypatch.setattr(Journal, "record", full)
    monkeypatch.setattr("server.finetune.attempt.STORAGE_SECONDS", 0.2)

    async def main() -> None:
        async with at_work(tmp_path) as work:
            job = await work.create()
            done = await work.until(job, Status.SUCCEEDED, Status.FAILED)
            assert (done.status, len(refusals)) == (Status.SUCCEEDED, 2)
            assert work.weights(job) == truth
            assert work.jobs.stats.crashes == 0

    asyncio.run(main())


def test_a_model_that_cannot_be_served_is_kept_and_its_owner_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path, monkeypatch)

    async def main() -> None:
        async with at_work(tmp_path) as work:
            work.refusal = InvalidAdapter("no room for it")
            job = await work.create()
            done = await work.until(job, Status.SUCCEEDED, Status.FAILED)
            assert done.status is Status.SUCCEEDED
            assert "The model is finished and kept, but not served now: no room for it" in await work.said(job)
        async with at_work(tmp_path) as work:  # the next start tries again
            assert [(name, owner) for name, _, owner in work.loaded] == [(done.fine_tuned_model, "me")]
            adapter = await work.jobs.adapter(str(done.fine_tuned_model))
            assert adapter is not None
            await work.jobs.remove_adapter(adapter)
            assert await work.jobs.adapter(adapter.name) is None
            assert not (tmp_path / "finetune" / "adapters" / job.id).exists()
        async with at_work(tmp_path) as work:
            assert work.loaded == []

    asyncio.run(main())


def test_a_job_is_held_for_as_long_as_its_model_takes_to_be_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer is gone by then, and its silence says nothing."""
    script(tmp_path, monkeypatch)
    silence, lease = 1.5, 2.0

    async def main() -> None:
        async with at_work(tmp_path, silence_limit=silence, lease_seconds=lease) as work:
            served, loading = asyncio.Event(), asyncio.Event()

            async def load(*_: object) -> None:
                loading.set()
                await served.wait()

            monkeypatch.setattr(work.jobs._finishing, "_load_adapter", load)
            job = await work.create()
            await asyncio.wait_for(loading.wait(), 60)
            begun = time.time()
            with contextlib.closing(sqlite3.connect(tmp_path / "finetune" / "jobs.sqlite3")) as store:
                held = "SELECT lease_until FROM jobs WHERE lease_until > ?"
                await work.wait(job, lambda _: store.execute(held, (begun + silence + 1 + lease,)).fetchone())
            served.set()
            await work.until(job, Status.SUCCEEDED)

    asyncio.run(main())


@pytest.mark.parametrize("cancelled", [True, False], ids=["cancelled", "another server's by then"])
def test_a_job_lost_while_its_model_is_loaded_takes_it_back_if_it_was_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    script(tmp_path, monkeypatch)

    async def main() -> None:
        async with at_work(tmp_path) as work:
            served, loading = asyncio.Event(), asyncio.Event()

            async def load(*asked: Any) -> None:
                loading.set()
                await served.wait()
                await work.load(*asked)

            monkeypatch.setattr(work.jobs._finishing, "_load_adapter", load)
            job = await work.create()
            await asyncio.wait_for(loading.wait(), 60)
            if cancelled:
                await work.jobs.cancel(job.id, "me")
            else:
                with contextlib.closing(JobStore(tmp_path / "finetune" / "jobs.sqlite3")) as store:
                    later = time.time() + 1000
                    thief = Leases(store, "thief", 10_000.0, back_off=0.0)
                    assert thief.claim(TRAIN, "base", later) is None
                    assert thief.claim(TRAIN, "base", later) is not None
            served.set()
            await work.wait(job, lambda _: work.trainer_pid is None)
            assert [name for name, _, _ in work.loaded] == ([] if cancelled else [f"ft:base::{job.id[6:18]}"])
            files = work.files.page("me", purpose=None, after=None, limit=9, order="asc")
            assert [file.purpose for file in files] == ["fine-tune", "fine-tune-results"][: 1 if cancelled else 2]

    asyncio.run(main())


def test_a_job_sent_again_is_the_same_job_although_its_file_is_gone(tmp_path: Path) -> None:
    async def main() -> None:
        async with at_work(tmp_path, start=False) as work:
            request = JobRequest("base", "supervised", Hyperparameters(), put(work.files, PAIR, "me"))
            job = await work.jobs.create("me", request, "once")
            work.files.delete(request.training_file, "me")
            assert await work.jobs.create("me", request, "once") == job
            with pytest.raises(InvalidRequest, match="Idempotency-Key was sent before, with another request"):
                await work.jobs.create("me", replace(request, suffix="other"), "once")
            with pytest.raises(InvalidFile):
                await work.jobs.create("me", request, "twice")
            assert [path.name for path in (tmp_path / "finetune" / "jobs").iterdir()] == [job.id]

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


def test_nothing_is_written_to_the_disk_before_somebody_asks(tmp_path: Path) -> None:
    async def main() -> None:
        async with at_work(tmp_path):
            await asyncio.sleep(0)
        assert not (tmp_path / "finetune").exists()

    asyncio.run(main())


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
