"""Jobs from their creation to their end, through real processes: success, failure, pause, cancellation."""

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from working import PAIR, Run, Work, is_running, put

from server.errors import InvalidFile, InvalidRequest, SequenceConflict
from server.finetune import Hyperparameters, JobRequest, Status, decided

pytestmark = pytest.mark.timeout(180)


def test_a_job_succeeds_and_leaves_a_model_metrics_and_nothing_else(run: Run, tmp_path: Path) -> None:
    async def main(work: Work) -> None:
        job = await work.create(suffix="mine", metadata={"a": "b"})
        assert job.status is Status.VALIDATING
        done = await work.succeeded(job)
        assert (done.trained_tokens, done.total_steps) == (60, 6)
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

    run(main, device="auto")


def test_a_job_without_a_rank_has_one_that_this_server_serves(run: Run) -> None:
    async def main(work: Work) -> None:
        job = await work.create(steps=1)
        assert decided(job).rank is None  # not before its files are validated
        done = await work.succeeded(job)
        assert (decided(done).rank, decided(done).alpha) == (4, 8)
        request = replace(job.request, hyperparameters=Hyperparameters(rank=5))
        with pytest.raises(InvalidRequest, match=r"lora.rank is 5; .* up to rank 4"):
            await work.jobs.create("me", request)

    run(main, max_rank=4)


def test_a_bad_file_fails_before_it_waits_for_a_trainer(run: Run) -> None:
    async def main(work: Work) -> None:
        running = await work.create()
        await work.until(running, Status.RUNNING)
        bad = await work.create(PAIR + b'{"prompt": "a", "completion": "bad"}\n')
        failed = await work.failed(bad)
        assert (failed.failure.code, failed.failure.param) == ("invalid_training_file", "training_file")
        assert failed.failure.message == "Line 2: it is bad."
        assert (await work.jobs.get(running.id, "me")).status is Status.RUNNING

    run(main, {"hold_at": 1})


def test_a_paused_job_keeps_a_checkpoint_and_no_process(run: Run, truth: str) -> None:
    async def main(work: Work) -> None:
        job = await work.create()
        pid = await work.trainer(job, step=2)
        assert (await work.jobs.pause(job.id, "me")).status is Status.PAUSED
        await work.wait(job, lambda _: work.trainer_is_told_to_stop)  # before it may go on: it stops after this step
        work.go_on()
        await work.wait(job, lambda _: work.trainer_pid is None and not is_running(pid))
        assert (await work.jobs.get(job.id, "me")).status is Status.PAUSED
        _, listed = await work.jobs.checkpoints(job.id, "me", None, 9)
        assert [point.metrics.step for point in listed] == [3, 2]
        await work.jobs.resume(job.id, "me")
        await work.succeeded(job)
        assert work.weights(job) == truth
        assert len(work.trained()) == 6  # nothing was done twice
        assert (work.jobs.stats.steps, work.jobs.stats.tokens) == (6, 60)
        assert (await work.said(job)).count("Checkpoint created at step 3") == 1

    run(main, {"hold_at": 3})


def test_a_cancelled_job_ends_at_once_and_says_nothing_more(run: Run) -> None:
    async def main(work: Work) -> None:
        job = await work.create()
        pid = await work.trainer(job, step=2)
        assert (await work.jobs.cancel(job.id, "me")).status is Status.CANCELLED
        await work.wait(job, lambda _: not is_running(pid) and not work.job_folder(job).exists())
        assert (await work.said(job))[-1] == "The job was cancelled"
        assert work.loaded == []

    run(main, {"hold_at": 3})


def test_a_job_sent_again_is_the_same_job_although_its_file_is_gone(run: Run, tmp_path: Path) -> None:
    async def main(work: Work) -> None:
        request = JobRequest("base", "supervised", Hyperparameters(), put(work.files, PAIR, "me"))
        job = await work.jobs.create("me", request, "once")
        work.files.delete(request.training_file, "me")
        assert await work.jobs.create("me", request, "once") == job
        with pytest.raises(SequenceConflict, match="Idempotency-Key was sent before, with another request"):
            await work.jobs.create("me", replace(request, suffix="other"), "once")
        with pytest.raises(InvalidFile):
            await work.jobs.create("me", request, "twice")
        assert [path.name for path in (tmp_path / "finetune" / "jobs").iterdir()] == [job.id]

    run(main, start=False)


@pytest.mark.parametrize("name", ["training_file", "validation_file"])
def test_a_file_that_is_deleted_while_a_job_is_made_of_it_is_an_invalid_one(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    async def main(work: Work) -> None:
        link = work.files.link

        def delete(file_id: str, owner: str, path: Path) -> None:
            if path.stem == name:
                work.files.delete(file_id, owner)
            link(file_id, owner, path)

        monkeypatch.setattr(work.files, "link", delete)
        with pytest.raises(InvalidFile, match=f"Invalid {name}: No such File object") as error:
            await work.create(validation_file=put(work.files, PAIR, "me"))
        assert error.value.param == name
        assert list((tmp_path / "finetune" / "jobs").iterdir()) == []

    run(main, start=False)


def test_nothing_is_written_to_the_disk_before_somebody_asks(run: Run, tmp_path: Path) -> None:
    async def main(work: Work) -> None:
        await asyncio.sleep(0)

    run(main)
    assert not (tmp_path / "finetune").exists()
