"""From a trainer's result to a model that is served: what is kept, and what is taken back."""

import asyncio
import contextlib
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from working import CONFIG, MODEL, Run, Work

from server.errors import EngineUnavailable, InvalidAdapter, LongwaveError, QuotaExceeded
from server.finetune import Status, TrainerConfig
from server.finetune.leases import TRAIN, Killed, Leases
from server.finetune.records import Step
from server.finetune.results import metrics_csv
from server.finetune.store import JobStore
from server.schemas.fine_tuning_reply import FineTuningJob

pytestmark = pytest.mark.timeout(180)


def test_a_model_that_cannot_be_served_is_kept_and_its_owner_told(run: Run) -> None:
    async def refused(work: Work) -> None:
        work.refusal = InvalidAdapter("no room for it")
        job = await work.succeeded(await work.create())
        assert "The model is finished and kept, but not served now: no room for it" in await work.said(job)

    async def served_by_the_next(work: Work) -> None:
        (job,) = await work.jobs.page("me", None, 9, {})
        assert [(name, owner) for name, _, owner in work.loaded] == [(job.fine_tuned_model, "me")]
        adapter = await work.jobs.adapter(str(job.fine_tuned_model))
        assert adapter is not None
        await work.jobs.remove_adapter(adapter)
        assert await work.jobs.adapter(adapter.name) is None
        assert not (work.folder / "finetune" / "adapters" / job.id).exists()

    async def gone(work: Work) -> None:
        assert work.loaded == []

    for test in (refused, served_by_the_next, gone):
        run(test)


def test_a_job_that_ends_while_the_engine_restarts_succeeds_when_its_model_is_served(run: Run) -> None:
    async def main(work: Work) -> None:
        work.refusal = EngineUnavailable("The engine is not ready.")
        job = await work.create()
        await work.told(
            job,
            "The model cannot be served yet: The engine is not ready. The training is done and kept; what is left of "
            "the job is tried again in",
        )
        assert (await work.jobs.get(job.id, "me")).status in (Status.QUEUED, Status.RUNNING)
        work.refusal = None
        done = await work.succeeded(job)
        assert [(name, owner) for name, _, owner in work.loaded] == [(done.fine_tuned_model, "me")]
        assert "not served now" not in " ".join(await work.said(job))
        assert (len(work.trained()), work.jobs.stats.crashes) == (6, 0)

    run(main)


def test_a_model_that_the_engine_cannot_take_when_the_server_starts_is_served_later_unless_it_is_deleted(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.finetune.supervisor.SERVE_SECONDS", 0.05)

    async def make(work: Work) -> None:
        for _ in range(2):
            await work.succeeded(await work.create(steps=1))

    async def serve(work: Work) -> None:
        deleted, kept = await work.jobs.page("me", None, 9, {})
        work.refusal = EngineUnavailable("The engine stopped while it loaded an adapter.")
        await work.jobs.start()
        assert work.loaded == []
        adapter = await work.jobs.adapter(str(deleted.fine_tuned_model))
        assert adapter is not None
        await work.jobs.remove_adapter(adapter)
        work.refusal = None
        await work.wait(kept, lambda _: work.loaded)
        assert [name for name, _, _ in work.loaded] == [kept.fine_tuned_model]

    run(make)
    run(serve, start=False)


@pytest.mark.parametrize(
    ("refusal", "served"),
    [(QuotaExceeded("64 adapters are loaded"), True), (InvalidAdapter("it is damaged"), False)],
    ids=["no room", "damaged"],
)
def test_a_model_for_which_the_engine_had_no_room_is_served_when_there_is_some(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refusal: LongwaveError, served: bool
) -> None:
    """What can never be served is read once and not every few seconds."""
    monkeypatch.setattr("server.finetune.supervisor.SERVE_SECONDS", 0.02)

    async def main(work: Work) -> None:
        work.refusal = refusal
        job = await work.succeeded(await work.create(steps=1))
        await asyncio.sleep(0.2)  # several looks
        work.refusal = None
        if served:
            await work.wait(job, lambda _: work.loaded)
        await asyncio.sleep(0.2)
        assert [name for name, _, _ in work.loaded] == ([job.fine_tuned_model] if served else [])

    run(main)
    (told,) = [record.message for record in caplog.records if "is not served" in record.message]
    assert "/finetune/adapters/ftjob-" in told


def test_a_damaged_model_is_served_when_it_is_mended_and_its_owner_alone_is_told_why_not_before(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.finetune.supervisor.SERVE_SECONDS", 0.02)

    async def main(work: Work) -> None:
        work.refusal = InvalidAdapter("it is damaged")
        job = await work.succeeded(await work.create(steps=1))
        name = str(job.fine_tuned_model)
        assert work.jobs.why_not_served(name, "me") == "it is damaged"
        assert work.jobs.why_not_served(name, "another") is None
        work.refusal = None
        (work.folder / "finetune" / "adapters" / job.id / "weights").write_text("from a copy")
        await work.wait(job, lambda _: work.loaded)
        await work.wait(job, lambda _: work.jobs.why_not_served(name, "me") is None)

    run(main)


def test_a_model_that_an_engine_started_anew_could_not_take_is_tried_again(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's client has taken it off its list, and nobody else knows."""
    monkeypatch.setattr("server.finetune.supervisor.SERVE_SECONDS", 0.02)

    async def main(work: Work) -> None:
        job = await work.succeeded(await work.create(steps=1))
        for error, seen in ((InvalidAdapter("no such file"), "no such file"), (None, None)):
            work.refusal, work.loaded = error, []
            await work.wait(job, lambda _, seen=seen: work.jobs.why_not_served(job.fine_tuned_model, "me") == seen)
            work.refusal = None
            (work.folder / "finetune" / "adapters" / job.id / "weights").touch()
            await work.wait(job, lambda _: work.loaded)

    run(main)


@pytest.mark.parametrize("before", [True, False], ids=["loaded before its row goes", "loaded after it"])
def test_a_model_that_is_loaded_while_it_is_deleted_is_not_served(
    run: Run, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    """The deletion has found nothing to unload."""

    async def make(work: Work) -> None:
        await work.succeeded(await work.create(steps=1))

    async def delete(work: Work) -> None:
        (job,) = await work.jobs.page("me", None, 9, {})
        adapter = await work.jobs.adapter(str(job.fine_tuned_model))
        assert adapter is not None

        async def load(*asked: Any) -> None:
            if not before:
                await work.jobs.remove_adapter(adapter)
            work.loaded.append(asked)  # type: ignore[arg-type]

        monkeypatch.setattr(work.jobs._finishing, "_load_adapter", load)
        await work.jobs.start()
        if before:
            await work.jobs.remove_adapter(adapter)
        assert work.loaded == []

    run(make)
    run(delete, start=False)


def test_a_file_of_metrics_is_made_beside_the_event_loop(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a million steps it takes seconds."""
    threads = []

    def made(steps: list[Step]) -> bytes:
        threads.append(threading.current_thread())
        return metrics_csv(steps)

    monkeypatch.setattr("server.finetune.finishing.metrics_csv", made)

    async def main(work: Work) -> None:
        await work.succeeded(await work.create(steps=1))

    run(main)
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


def test_a_job_is_held_for_as_long_as_its_model_takes_to_be_served(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer is gone by then, and its silence says nothing."""

    async def main(work: Work) -> None:
        served, loading = asyncio.Event(), asyncio.Event()

        async def load(*_: object) -> None:
            loading.set()
            await served.wait()

        monkeypatch.setattr(work.jobs._finishing, "_load_adapter", load)
        job = await work.create()
        await asyncio.wait_for(loading.wait(), 60)
        begun, config = time.time(), TrainerConfig(MODEL, **CONFIG)
        work.jobs.supervisor.attempts["train"]._heard -= 10 * config.silence_limit
        with contextlib.closing(sqlite3.connect(tmp_path / "finetune" / "jobs.sqlite3")) as store:
            held = "SELECT lease_until FROM jobs WHERE lease_until > ?"
            later = begun + 1 + config.lease_seconds  # after several looks at the silence
            await work.wait(job, lambda _: store.execute(held, (later,)).fetchone())
        served.set()
        await work.until(job, Status.SUCCEEDED)

    run(main)


@pytest.mark.parametrize("cancelled", [True, False], ids=["cancelled", "another server's by then"])
def test_a_job_lost_while_its_model_is_loaded_is_not_served_and_taken_back_if_it_was_cancelled(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    async def main(work: Work) -> None:
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
            assert work.job_folder(job).exists()  # not while somebody works in it
        else:
            with contextlib.closing(JobStore(tmp_path / "finetune" / "jobs.sqlite3")) as store:
                later = time.time() + 1000
                thief = Leases(store, "thief", 10_000.0, back_off=0.0, is_gone=lambda _: False)
                assert thief.claim(TRAIN, "base", later) == Killed(failed=False)
                assert thief.claim(TRAIN, "base", later) is not None
        served.set()
        await work.wait(job, lambda _: work.trainer_pid is None and work.job_folder(job).exists() is not cancelled)
        assert work.loaded == []
        files = work.files.page("me", purpose=None, after=None, limit=9, order="asc")
        assert [file.purpose for file in files] == ["fine-tune", "fine-tune-results"][: 1 if cancelled else 2]
        adapters = [path.name for path in (tmp_path / "finetune" / "adapters").iterdir()]
        assert adapters == ([] if cancelled else [job.id])  # the other server's, who finishes it

    run(main)


def test_a_model_whose_end_cannot_be_written_is_not_served_until_it_is(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    succeeded, refusals = Leases.succeeded, []

    def full(leases: Leases, *asked: Any, **named: Any) -> None:
        if len(refusals) < 2:
            refusals.append(asked)
            raise sqlite3.OperationalError("database or disk is full")
        succeeded(leases, *asked, **named)

    monkeypatch.setattr(Leases, "succeeded", full)
    monkeypatch.setattr("server.finetune.setbacks.MIN_WAIT", 0.2)

    async def main(work: Work) -> None:
        job = await work.create()
        await work.wait(job, lambda _: refusals)
        await work.wait(job, lambda now: work.loaded == [] or now.status is Status.SUCCEEDED)
        done = await work.until(job, Status.SUCCEEDED, Status.FAILED)
        assert (done.status, len(refusals), work.jobs.stats.crashes) == (Status.SUCCEEDED, 2, 0)
        assert [name for name, _, _ in work.loaded] == [done.fine_tuned_model]

    run(main)


def test_a_job_cancelled_after_its_end_could_not_be_written_leaves_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def full(*_: Any, **__: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Leases, "succeeded", full)

    async def main(work: Work) -> None:
        job = await work.create()
        place = tmp_path / "finetune" / "adapters" / job.id
        await work.wait(job, lambda now: place.exists() and now.status is Status.QUEUED)  # for MIN_WAIT
        assert work.loaded == []
        waiting = await work.jobs.get(job.id, "me")
        assert (waiting.trained_tokens, FineTuningJob.of(waiting).trained_tokens) == (60, None)  # it is not done yet
        await work.jobs.cancel(job.id, "me")
        await work.wait(job, lambda _: not work.job_folder(job).exists())
        assert not place.exists()
        files = work.files.page("me", purpose=None, after=None, limit=9, order="asc")
        assert [file.purpose for file in files] == ["fine-tune"]

    run(main)
