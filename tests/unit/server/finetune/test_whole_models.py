"""Jobs that tune all weights: what they make is a folder, kept and not served, until its owner deletes it."""

from pathlib import Path
from typing import Any

import pytest
from test_killed_finish import killed
from working import Run, Work, script

from server.errors import InsufficientStorage
from server.finetune import Job, Status, decided
from server.finetune.setbacks import MAX_CRASHES

pytestmark = pytest.mark.timeout(180)


async def begin(work: Work, owner: str = "me") -> Job:
    return await work.create(owner=owner, steps=2, training_type="full")


def models(work: Work) -> list[str]:
    folder = work.folder / "finetune" / "models"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_a_whole_model_is_kept_and_not_served_until_it_is_deleted(run: Run) -> None:
    async def main(work: Work) -> None:
        done = await work.succeeded(await begin(work))
        name = str(done.fine_tuned_model)
        assert name == f"ft:base::{done.id[6:18]}"
        assert decided(done).rank is None
        assert models(work) == [done.id]
        assert (work.folder / "finetune" / "models" / done.id / "weights").exists()
        assert work.loaded == []
        assert await work.jobs.adapter(name) is None
        assert (await work.said(done))[-2:] == [
            f"It is a whole model, in finetune/models/{done.id} of the server's data directory: `longwave serve "
            "--model` with that folder serves it",
            "The job has successfully completed",
        ]  # fmt: skip
        await work.wait(done, lambda _: not work.job_folder(done).exists())
        await work.jobs.supervisor.tidy()
        assert models(work) == [done.id]
        assert not await work.jobs.remove_model(name, "you")
        assert await work.jobs.remove_model(name, "me")
        assert models(work) == []
        assert not await work.jobs.remove_model(name, "me")

    run(main)


def test_an_adapter_is_no_whole_model(run: Run) -> None:
    async def main(work: Work) -> None:
        done = await work.succeeded(await work.create(steps=1))
        assert not await work.jobs.remove_model(str(done.fine_tuned_model), "me")
        assert await work.jobs.adapter(str(done.fine_tuned_model)) is not None

    run(main)


def test_to_ask_for_a_model_leaves_no_trace_where_there_never_was_a_job(run: Run, tmp_path: Path) -> None:
    async def main(work: Work) -> None:
        assert not await work.jobs.remove_model("ft:base::123", "me")
        assert not (tmp_path / "finetune").exists()

    run(main)


def test_the_next_server_keeps_what_is_there_and_serves_none_of_it(run: Run) -> None:
    async def first(work: Work) -> None:
        await work.succeeded(await begin(work))

    async def second(work: Work) -> None:
        (job,) = await work.jobs.page("me", None, 9, {})
        assert models(work) == [job.id]
        assert work.loaded == []

    run(first)
    run(second)


def test_a_model_above_the_limit_fails_before_it_is_trained(run: Run) -> None:
    async def main(work: Work) -> None:
        failed = await work.failed(await begin(work))
        assert failed.failure is not None
        assert (failed.failure.code, failed.failure.message) == (
            "invalid_hyperparameters", "the base model has 101 parameters",
        )  # fmt: skip
        await work.succeeded(await work.create(steps=1))  # an adapter is trained on a model of any size

    run(main, {"parameters": 101}, max_full_parameters=100)


def test_a_device_that_is_too_small_fails_the_job_with_the_reason(run: Run) -> None:
    async def main(work: Work) -> None:
        failed = await work.failed(await begin(work))
        assert failed.failure is not None
        assert failed.failure.code == "out_of_memory"
        assert failed.failure.message.startswith(
            "Full fine-tuning keeps 9 GiB; cpu has 1 GiB free. It was tried 4 times"
        )
        await work.wait(failed, lambda _: not work.job_folder(failed).exists())
        assert models(work) == []

    run(main, {"raise_at": 1, "error": "too large"})


@pytest.mark.parametrize("kind", [pytest.param("lora", marks=pytest.mark.thorough), "full"])
def test_a_result_stays_with_its_trainer_until_everything_else_is_on_the_disk(
    run: Run, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("server.finetune.setbacks.MIN_WAIT", 0.1)

    async def main(work: Work) -> None:
        put, left = work.files.put, []

        def full(*given: Any, **named: Any) -> Any:
            if named["purpose"] == "fine-tune-results" and len(left) < MAX_CRASHES:
                left.append([path.parent.name for path in (work.folder / "finetune").rglob("result")])
                raise InsufficientStorage("The disk is full.")
            return put(*given, **named)

        monkeypatch.setattr(work.files, "put", full)
        done = await work.succeeded(await work.create(steps=2, training_type=kind))
        assert left == [["run"]] * MAX_CRASHES
        assert work.jobs.stats.crashes == 0
        assert len(work.trained()) == 2
        said = await work.said(done)
        assert sum(text.startswith("The server had no room to write down") for text in said) == MAX_CRASHES

    run(main)


def test_a_server_of_a_lower_limit_refuses_what_another_has_validated(run: Run) -> None:
    async def validate(work: Work) -> None:
        job = await begin(work)
        await work.wait(job, lambda now: now.plan is not None)
        await work.jobs.pause(job.id, "me")

    async def refuse(work: Work) -> None:
        (job,) = await work.jobs.page("me", None, 9, {})
        await work.jobs.resume(job.id, "me")
        failed = await work.failed(job)
        assert failed.failure is not None
        assert failed.failure.message == "the base model has 50 parameters"
        await work.wait(job, lambda _: not work.job_folder(job).exists())
        assert models(work) == []

    run(validate, {"parameters": 50, "hold_at": 1}, max_full_parameters=50)
    run(refuse, {"parameters": 50}, max_full_parameters=49)


@pytest.mark.slow
@pytest.mark.parametrize(
    "instant",
    [
        "the adapter is in its place",
        pytest.param("the model is served", marks=pytest.mark.thorough),
        pytest.param("the job has succeeded", marks=pytest.mark.thorough),
    ],
)
def test_a_job_killed_at_its_end_keeps_one_model_and_a_cancelled_one_none(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instant: str
) -> None:
    script(tmp_path, monkeypatch)
    job_id = killed(tmp_path, instant, "full")

    async def main(work: Work) -> None:
        job = await work.jobs.get(job_id, "me")
        assert models(work) == [job_id]
        if job.status is not Status.SUCCEEDED:
            await work.jobs.cancel(job_id, "me")
            await work.jobs.supervisor.tidy()
            assert not work.job_folder(job).exists()
            assert models(work) == []
        await work.jobs.supervisor.tidy()
        assert models(work) == ([job_id] if job.status is Status.SUCCEEDED else [])

    run(main, start=False)


@pytest.mark.slow
def test_a_job_killed_at_its_end_succeeds_with_the_next_server(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path, monkeypatch)
    job_id = killed(tmp_path, "the result file is listed", "full")

    async def main(work: Work) -> None:
        done = await work.succeeded(await work.jobs.get(job_id, "me"))
        assert models(work) == [done.id]
        assert work.loaded == []

    run(main)
