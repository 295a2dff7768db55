"""Whole models on the disk: how many there may be, how they are deleted, and what is swept."""

import asyncio
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from job_makers import REQUEST, create, leases, opened, training
from test_whole_models import begin, models
from working import LIMIT, Run, Work

from server.errors import InsufficientStorage, QuotaExceeded
from server.files.folder import make_private
from server.finetune import Hyperparameters, Status
from server.finetune.folders import DELETED, ORPHAN_SECONDS, Folders
from server.finetune.places import TooManyModelsError

pytestmark = pytest.mark.timeout(180)

FULL = Hyperparameters(training_type="full")


def test_kept_models_and_those_being_made_are_bounded_together(run: Run) -> None:
    async def main(work: Work) -> None:
        kept = await work.succeeded(await begin(work))
        await begin(work, "you")
        with pytest.raises(QuotaExceeded, match="keeps 2 fully tuned models"):
            await begin(work)
        assert await work.jobs.remove_model(str(kept.fine_tuned_model), "me")
        await begin(work)

    run(main, max_full_models=2)


def test_two_requests_at_once_do_not_pass_the_bound_together(tmp_path: Path) -> None:
    full = {"hyperparameters": FULL}
    with opened(tmp_path) as store:
        create(store, **full, max_full=1)
        with pytest.raises(TooManyModelsError):
            create(store, "ftjob-2", **full, max_full=1)
        assert store.known("ftjob-2") is None
        create(store, "ftjob-3", max_full=1)
        assert store.get("ftjob-3").request == replace(REQUEST)


def test_a_model_that_is_in_its_place_before_its_job_has_ended_counts_once(tmp_path: Path) -> None:
    folders, full = Folders(tmp_path), {"hyperparameters": FULL}
    with opened(tmp_path) as store:
        create(store, **full)
        (tmp_path / "models" / "ftjob-1").mkdir(parents=True)
        create(store, "ftjob-2", **full, max_full=2, models=folders.models)
        with pytest.raises(TooManyModelsError):
            create(store, "ftjob-3", **full, max_full=2, models=folders.models)


def test_models_are_counted_when_nobody_else_can_end_a_job(tmp_path: Path) -> None:
    """Counted before, the job is not on the disk yet, and when the job is created it lives no more."""
    folders, full = Folders(tmp_path), {"hyperparameters": FULL}

    def counted() -> set[str]:
        assert store.connection.in_transaction
        return folders.models()

    with opened(tmp_path) as store:
        held = leases(store)
        create(store, **full)
        job = training(store, held)
        (tmp_path / "models" / job.id).mkdir(parents=True)
        held.succeeded(job, 110.0, model="ft:x", trained_tokens=1, result_file=None, notes=[])
        with pytest.raises(TooManyModelsError):
            create(store, "ftjob-2", **full, max_full=1, models=counted)


def test_a_model_that_cannot_be_deleted_is_kept_and_a_deleted_one_is_gone_after_a_power_loss(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(work: Work) -> None:
        done = await work.succeeded(await begin(work))
        folder = work.folder / "finetune" / "models"
        (folder / f"{DELETED}{done.id}").touch()  # no folder can have that name
        with pytest.raises(InsufficientStorage, match="cannot be deleted"):
            await work.jobs.remove_model(str(done.fine_tuned_model), "me")
        assert done.id in models(work)
        (folder / f"{DELETED}{done.id}").unlink()
        synced = []
        monkeypatch.setattr("server.finetune.folders.sync_folder", lambda path: synced.append((path, models(work))))
        assert await work.jobs.remove_model(str(done.fine_tuned_model), "me")
        assert synced == [(folder, [f"{DELETED}{done.id}"])]

    run(main)


def test_requests_do_not_wait_while_what_is_left_is_removed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    removing, removed = threading.Event(), threading.Event()

    def remove(*_: Any, **__: Any) -> None:
        removing.set()
        removed.wait(LIMIT)

    async def main(work: Work) -> None:
        job = await work.create()
        await work.trainer(job, step=2)
        monkeypatch.setattr("shutil.rmtree", remove)
        async with asyncio.timeout(LIMIT / 2):
            assert (await work.jobs.cancel(job.id, "me")).status is Status.CANCELLED
            assert await asyncio.to_thread(removing.wait, LIMIT / 4)
            other = await work.create()
            await work.until(other, Status.RUNNING)  # nor does the next job
        removed.set()

    run(main, {"hold_at": 3})


def test_leases_are_renewed_while_what_is_left_is_removed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    removing, removed = threading.Event(), threading.Event()

    def remove(*_: Any, **__: Any) -> None:
        removing.set()
        removed.wait(LIMIT)

    async def main(work: Work) -> None:
        make_private(work.folder / "finetune")
        (work.folder / "finetune" / "models" / f"{DELETED}ftjob-1").mkdir(parents=True)
        monkeypatch.setattr("shutil.rmtree", remove)
        tidying = asyncio.create_task(work.jobs.supervisor.tidy())
        await asyncio.to_thread(removing.wait, LIMIT)
        async with asyncio.timeout(LIMIT / 2):
            assert await work.jobs.page("me", None, 9, {}) == []  # by the thread that renews leases
        removed.set()
        await tidying

    run(main, start=False)


def test_what_no_job_keeps_is_swept_and_a_deletion_that_was_cut_short_is_finished(tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    jobs = ("ftjob-kept", "ftjob-live", "ftjob-failed", "ftjob-unknown", "ftjob-unknown-old")
    before = time.time() - 2 * ORPHAN_SECONDS
    for name in (f"{DELETED}ftjob-1", "renamed-by-hand", *jobs):
        (tmp_path / "models" / name).mkdir(parents=True)
        if name.endswith(("-old", "-hand")):
            os.utime(tmp_path / "models" / name, (before, before))
    assert folders.models() == set(jobs)
    ended = {"ftjob-kept": True, "ftjob-live": False, "ftjob-failed": True}
    strays = folders.stray_models(ended.get, lambda job_id: job_id == "ftjob-kept")
    assert sorted(path.name for path in strays) == [f"{DELETED}ftjob-1", "ftjob-failed", "ftjob-unknown-old"]
