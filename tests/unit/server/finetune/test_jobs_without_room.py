"""A job for which there is no room on the disk, or in memory, waits and loses nothing."""

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from job_makers import MODEL, create, leases, messages, opened, step, training
from working import Run, Work, write_script

from server.answering import AnsweringSign
from server.errors import InvalidJobStatus
from server.files.ballast import BYTES
from server.finetune import Hyperparameters, Job, Status
from server.finetune.journal import Journal
from server.finetune.leases import TRAIN, Leases
from server.finetune.places import GIVEN_UP, TooManyModelsError
from server.finetune.records import KEPT_SECONDS
from server.finetune.setbacks import BUSY_SECONDS, LESS, MAX_CRASHES, MAX_WAIT
from server.finetune.store import JobStore, WrongStatusError

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def _waits_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.finetune.setbacks.MIN_WAIT", 0.05)
    monkeypatch.setattr("server.finetune.setbacks.MAX_WAIT", 0.05)


def test_a_full_disk_stops_the_trainer_and_the_job_goes_on_when_there_is_room(
    run: Run, truth: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, refusals = Journal.record, []

    def full(journal: Journal, job_id: str, now: float, step: object, total: int) -> bool:
        if getattr(step, "step", 0) == 4 and len(refusals) < 2:
            refusals.append(step)
            raise sqlite3.OperationalError("database or disk is full")
        return record(journal, job_id, now, step, total)  # type: ignore[arg-type]

    monkeypatch.setattr(Journal, "record", full)
    monkeypatch.setattr("server.finetune.setbacks.MIN_WAIT", 0.2)

    async def main(work: Work) -> None:
        job = await work.create()
        done = await work.until(job, Status.SUCCEEDED, Status.FAILED)
        assert (done.status, len(refusals)) == (Status.SUCCEEDED, 2)
        assert work.weights(job) == truth
        stats = work.jobs.stats
        assert (stats.crashes, stats.storage_failures, stats.waits) == (0, 2, 2)

    run(main)


def test_a_data_directory_that_hangs_does_not_hang_the_server(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    looked, go_on = threading.Event(), threading.Event()
    was_let_go: list[bool] = []

    class Hanging(type(Path())):  # type: ignore[misc]
        def exists(self) -> bool:
            if self.name == "finetune":
                looked.set()
                was_let_go.append(go_on.wait(5.0))
            return bool(super().exists())

    async def main(work: Work) -> None:
        monkeypatch.setattr(work.jobs._folders, "root", Hanging(work.jobs._folders.root))
        while not looked.is_set():
            await asyncio.sleep(0.01)
        go_on.set()
        await work.succeeded(await work.create(steps=1))
        assert all(was_let_go)

    run(main)


def test_a_full_disk_lets_a_job_be_cancelled_and_its_model_be_deleted(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both make room, and SQLite needs some for them: that of the ballast."""
    ballast = tmp_path / "finetune" / "ballast"

    def full(act: Callable[..., Any]) -> Callable[..., Any]:
        def attempt(*asked: Any) -> Any:
            if ballast.exists():
                raise sqlite3.OperationalError("database or disk is full")
            return act(*asked)

        return attempt

    for name in ("cancel", "remove_adapter"):
        monkeypatch.setattr(JobStore, name, full(getattr(JobStore, name)))

    async def main(work: Work) -> None:
        done = await work.succeeded(await work.create())
        assert ballast.stat().st_size == BYTES
        adapter = await work.jobs.adapter(str(done.fine_tuned_model))
        assert adapter is not None
        await work.jobs.remove_adapter(adapter)
        assert await work.jobs.adapter(adapter.name) is None
        assert (await work.jobs.cancel((await work.create()).id, "me")).status is Status.CANCELLED
        assert ballast.stat().st_size == BYTES

    run(main)


def test_the_room_that_a_full_disk_has_taken_is_kept_again_when_there_is_some(run: Run, tmp_path: Path) -> None:
    """Also where nobody cancels or deletes anything until the next time."""
    ballast = tmp_path / "finetune" / "ballast"

    async def main(work: Work) -> None:
        await work.succeeded(await work.create(steps=1))
        ballast.unlink()
        await work.jobs.supervisor.tidy()
        assert ballast.stat().st_size == BYTES

    run(main)


def make_room(work: Work) -> None:
    write_script(work.folder, {})


NO_ROOM = {
    "full": "The server's disk is full",
    "full for a checkpoint": "The server's disk is full",
}
NO_MEMORY = {
    "too large": "Full fine-tuning keeps 9 GiB; cpu has 1 GiB free",
    "out of memory": "The device has too little memory for the job: 9 tokens did not fit",
}


@pytest.mark.parametrize("error", ["full for a checkpoint", pytest.param("full", marks=pytest.mark.thorough)])
@pytest.mark.usefixtures("_waits_are_short")
def test_a_job_with_a_checkpoint_waits_for_room_and_loses_nothing(run: Run, truth: str, error: str) -> None:
    async def main(work: Work) -> None:
        job = await work.create()
        await work.wait(job, lambda now: now.attempt > MAX_CRASHES + 1)  # its validation was one
        assert (await work.jobs.get(job.id, "me")).status in (Status.QUEUED, Status.RUNNING)
        events = await work.jobs.events(job.id, "me", None, 100)
        warned = {event.message for event in events if event.level == "warn"}
        assert warned == {f"{NO_ROOM[error]}. The job waits, and is tried again in 0 s"}
        make_room(work)
        done = await work.succeeded(job)
        assert (done.crashes, work.jobs.stats.crashes) == (0, 0)
        assert work.weights(job) == truth
        assert len(work.trained()) == 6  # step 3 on, from the checkpoint of step 2

    run(main, {"raise_at": 3, "error": error})


@pytest.mark.parametrize("error", ["out of memory", pytest.param("too large", marks=pytest.mark.thorough)])
@pytest.mark.usefixtures("_waits_are_short")
def test_a_job_that_does_not_fit_alone_fails_in_words_and_can_be_resumed_from_its_checkpoint(
    run: Run, truth: str, error: str
) -> None:
    async def fail(work: Work) -> None:
        failed = await work.failed(await work.create())
        assert failed.failure is not None
        assert failed.failure.code == "out_of_memory"
        assert failed.failure.message == (
            f"{NO_MEMORY[error]}. It was tried 4 times without a new checkpoint. {LESS}. The checkpoint of step 2 is "
            "kept for 7 days: the job can be resumed."
        )
        warned = [
            event.message for event in await work.jobs.events(failed.id, "me", None, 100) if event.level == "warn"
        ]
        assert warned[::-1] == [
            f"{NO_MEMORY[error]} (attempt {tried} of 4). The job waits, and is tried again in 0 s"
            for tried in (1, 2, 3)
        ]
        assert (failed.attempt, work.jobs.stats.crashes) == (MAX_CRASHES + 1, 0)  # its validation was one

    async def resume(work: Work) -> None:
        (failed,) = await work.jobs.page("me", None, 1, {})
        await work.jobs.supervisor.tidy()
        resumed = await work.jobs.resume(failed.id, "me")
        assert (resumed.status, resumed.failure, resumed.finished_at) == (Status.QUEUED, None, None)
        await work.succeeded(failed)
        assert work.weights(failed) == truth
        assert len(work.trained()) == 6  # step 3 on, from the checkpoint of step 2

    run(fail, {"raise_at": 3, "error": error})
    run(resume)


@pytest.mark.usefixtures("_waits_are_short")
def test_while_others_are_answered_too_little_memory_is_waited_for(run: Run, truth: str) -> None:
    sign = AnsweringSign()
    sign.show(True)

    async def main(work: Work) -> None:
        job = await work.create()
        await work.wait(job, lambda now: now.attempt > MAX_CRASHES + 1)
        assert "9 tokens did not fit, while requests are answered. The job waits" in " ".join(await work.said(job))
        make_room(work)
        done = await work.succeeded(job)
        assert (done.crashes, work.weights(job)) == (0, truth)

    run(main, {"raise_at": 3, "error": "out of memory"}, answering_fd=sign.fd)


def test_a_job_that_waits_for_room_waits_a_while_lets_others_work_and_is_cancelled_at_once(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.finetune.setbacks.MIN_WAIT", MAX_WAIT)  # longer than the others take

    async def main(work: Work) -> None:
        job = await work.create()
        await work.told(job, "The server's disk is full. The job waits, and is tried again in 300 s")
        waiting = await work.until(job, Status.QUEUED)
        await work.succeeded(await work.create(steps=2))
        assert (await work.jobs.get(job.id, "me")).attempt == waiting.attempt
        await work.jobs.cancel(job.id, "me")
        await work.wait(job, lambda _: not work.job_folder(job).exists())

    run(main, {"raise_at": 3, "error": "full"})


def test_a_disk_that_is_full_before_the_first_checkpoint_is_waited_for_and_memory_is_not(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.finetune.setbacks.MAX_WAIT", 0.05)

    async def wait(work: Work) -> None:
        job = await work.create(steps=1)
        await work.wait(job, lambda now: now.attempt > MAX_CRASHES + 1)
        make_room(work)
        await work.succeeded(job)

    async def fail(work: Work) -> None:
        failed = await work.failed(await work.create(steps=1))
        assert failed.failure is not None
        assert failed.failure.code == "out_of_memory"
        assert (
            failed.failure.message
            == f"{NO_MEMORY['out of memory']}. It was tried 4 times without a new checkpoint. {LESS}."
        )
        await work.wait(failed, lambda _: not work.job_folder(failed).exists())
        with pytest.raises(InvalidJobStatus, match="cannot be resumed"):
            await work.jobs.resume(failed.id, "me")

    run(wait, {"raise_at": 1, "error": "full"})
    run(fail, {"raise_at": 1, "error": "out of memory"})


def test_a_job_without_room_waits_longer_the_longer_it_has_made_no_checkpoint_and_never_crashes(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        create(store)
        held = leases(store)
        job, now, waits = training(store, held), 1000.0, []
        held.stepped(job, now, step(1), 99, checkpoint=True)
        for _ in range(8):
            held.no_room(job, now, "The disk is full")
            before = now
            while (taken := held.claim(TRAIN, MODEL, now)) is None:
                now += 1.0
            job, waits = taken, [*waits, now - before]
        assert waits == [10.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]
        assert (job.status, job.crashes) == (Status.RUNNING, 0)
        assert messages(store)[-1] == "The disk is full. The job waits, and is tried again in 300 s"
        held.stepped(job, now, step(2), 99, checkpoint=True)
        held.no_room(job, now, "The disk is full")
        assert held.claim(TRAIN, MODEL, now + 10.0) is not None


def test_a_job_that_was_paused_while_it_had_no_room_is_paused(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        create(store)
        held = leases(store)
        job = training(store, held)
        store.pause(job.id, 103.0)
        held.no_room(job, 104.0, "x")
        assert store.get(job.id).status is Status.PAUSED
        store.resume(job.id, 105.0)
        assert held.claim(TRAIN, MODEL, 105.0) is not None  # whoever resumes it may have made room


def too_often(store: JobStore, held: Leases, now: float) -> Job:
    """The job, which has failed for want of memory by `now`."""
    job = training(store, held)
    held.stepped(job, 103.0, step(1), 99, checkpoint=True)
    while not held.out_of_memory(job, now, "x", answering=False):
        taken = held.claim(TRAIN, MODEL, now + MAX_WAIT)
        assert taken is not None
        job = taken
    return store.get(job.id)


def test_open_requests_are_no_excuse_for_ever(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        create(store)
        held = leases(store)
        job = training(store, held)
        held.stepped(job, 103.0, step(1), 99, checkpoint=True)
        refusals, now = 0, 103.0
        while not held.out_of_memory(job, now, "x", answering=True):
            refusals, now = refusals + 1, now + MAX_WAIT
            taken = held.claim(TRAIN, MODEL, now)
            assert taken is not None
            job = taken
        assert now == 103.0 + BUSY_SECONDS + (MAX_CRASHES - 1) * MAX_WAIT
        assert (store.get(job.id).status, refusals) == (Status.FAILED, BUSY_SECONDS / MAX_WAIT + MAX_CRASHES - 1)


def test_a_job_that_has_failed_is_resumed_while_its_checkpoints_are_kept_and_there_is_a_place(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        create(store, hyperparameters=Hyperparameters(training_type="full"))
        failed = too_often(store, leases(store), 200.0)
        assert failed.finished_at is not None
        last = failed.finished_at + KEPT_SECONDS
        create(store, "ftjob-2", hyperparameters=Hyperparameters(training_type="full"))
        assert store.resume_failed(failed.id, 300.0, 1, 99, set) is None
        with pytest.raises(TooManyModelsError):
            store.resume_failed(failed.id, 300.0, 99, 1, set)
        with pytest.raises(WrongStatusError):
            store.resume_failed(failed.id, last, 99, 99, set)
        resumed = store.resume_failed(failed.id, last - 1.0, 99, 99, set)
        assert resumed is not None
        assert (resumed.status, resumed.crashes, resumed.failure) == (Status.QUEUED, 0, None)


def test_a_job_that_has_failed_is_cancelled_while_its_checkpoints_are_kept(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        create(store)
        failed = too_often(store, leases(store), 200.0)
        with pytest.raises(WrongStatusError):
            store.cancel(failed.id, 201.0 + KEPT_SECONDS)
        assert store.cancel(failed.id, 201.0).status is Status.CANCELLED


@pytest.mark.usefixtures("_waits_are_short")
def test_what_a_failed_job_keeps_is_given_up_for_a_new_job_that_would_pass_the_limit(run: Run) -> None:
    async def main(work: Work) -> None:
        failed = await work.failed(await work.create())
        await work.jobs.supervisor.tidy()
        assert (work.job_folder(failed) / "run").exists()
        make_room(work)
        await work.create()
        await work.wait(failed, lambda _: not work.job_folder(failed).exists())
        assert (await work.said(failed))[-1] == GIVEN_UP
        with pytest.raises(InvalidJobStatus, match="cannot be resumed"):
            await work.jobs.resume(failed.id, "me")

    run(main, {"raise_at": 3, "error": "out of memory"}, max_live_jobs=1)


@pytest.mark.usefixtures("_waits_are_short")
def test_what_a_failed_job_keeps_goes_when_its_time_is_over_or_it_is_cancelled(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(work: Work) -> None:
        cancelled = await work.failed(await work.create())
        await work.jobs.cancel(cancelled.id, "me")
        await work.wait(cancelled, lambda _: not work.job_folder(cancelled).exists())
        failed = await work.failed(await work.create())
        await work.jobs.supervisor.tidy()
        assert (work.job_folder(failed) / "run").exists()
        monkeypatch.setattr("server.finetune.records.KEPT_SECONDS", 0.0)
        await work.jobs.supervisor.tidy()
        assert not work.job_folder(failed).exists()

    run(main, {"raise_at": 3, "error": "out of memory"})
