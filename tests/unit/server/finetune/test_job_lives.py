"""Jobs from their creation to their end, through real processes: success, failure, pause, cancellation."""

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from working import PAIR, at_work, is_running, put, script, trained, uninterrupted

from server.errors import InvalidFile, InvalidRequest
from server.finetune import Hyperparameters, JobRequest, Status, decided

pytestmark = pytest.mark.timeout(180)


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


def test_a_job_without_a_rank_has_one_that_this_server_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, monkeypatch)

    async def main() -> None:
        async with at_work(tmp_path, max_rank=4) as work:
            job = await work.create(steps=1)
            assert decided(job).rank is None  # not before its files are validated
            done = await work.until(job, Status.SUCCEEDED, Status.FAILED)
            assert (done.status, decided(done).rank, decided(done).alpha) == (Status.SUCCEEDED, 4, 8)
            request = replace(job.request, hyperparameters=Hyperparameters(rank=5))
            with pytest.raises(InvalidRequest, match=r"lora.rank is 5; .* up to rank 4"):
                await work.jobs.create("me", request)

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


def test_nothing_is_written_to_the_disk_before_somebody_asks(tmp_path: Path) -> None:
    async def main() -> None:
        async with at_work(tmp_path):
            await asyncio.sleep(0)
        assert not (tmp_path / "finetune").exists()

    asyncio.run(main())
