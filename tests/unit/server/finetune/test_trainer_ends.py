"""However a trainer process ends, its job goes on from a checkpoint or fails with the reason."""

import asyncio
import os
import sqlite3
from collections import Counter
from pathlib import Path

import pytest
from working import at_work, script, trained, uninterrupted

from server.finetune import Status
from server.finetune.journal import Journal
from server.finetune.leases import MAX_CRASHES
from server.finetune.worker import NICENESS, OOM_SCORE

pytestmark = pytest.mark.timeout(180)


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
