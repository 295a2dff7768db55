"""Failed jobs that keep their checkpoints count among those that there may be, and give way to new ones."""

from pathlib import Path
from typing import Any

from job_makers import MODEL, create, leases, messages, opened, step, training

from server.finetune import Hyperparameters
from server.finetune.leases import TRAIN
from server.finetune.places import GIVEN_UP
from server.finetune.records import KEPT_SECONDS
from server.finetune.setbacks import MAX_WAIT
from server.finetune.store import JobStore

FULL = Hyperparameters(training_type="full")


def fail(store: JobStore, name: str, now: float, **changes: Any) -> None:
    """With a checkpoint, so that the job can be resumed."""
    create(store, name, now=now, **changes)
    held = leases(store)
    job = training(store, held, now)
    held.stepped(job, now, step(1), 99, checkpoint=True)
    while not held.out_of_memory(job, now, "x", answering=False):
        now += MAX_WAIT
        taken = held.claim(TRAIN, MODEL, now)
        assert taken is not None
        job = taken


def kept(store: JobStore, now: float) -> list[str]:
    ids = [name for (name,) in store.connection.execute("SELECT id FROM jobs ORDER BY sequence")]
    return [name for name in ids if store.get(name).can_be_resumed(now)]


def test_failed_jobs_keep_no_new_job_out_and_are_no_more_than_there_may_be_jobs(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        for number in range(6):
            fail(store, f"ftjob-{number}", 1e4 * number, max_live=3)
        assert kept(store, 6e4) == ["ftjob-3", "ftjob-4", "ftjob-5"]
        create(store, "ftjob-6", now=6e4, max_live=3)
        assert kept(store, 6e4) == ["ftjob-4", "ftjob-5"]
        given_up = store.get("ftjob-3").failure
        assert given_up is not None
        assert (messages(store, "ftjob-3")[-1], given_up.message.endswith(f"can be resumed. {GIVEN_UP}")) == (
            GIVEN_UP,
            True,
        )
        assert GIVEN_UP not in messages(store, "ftjob-5")


def test_the_owners_failed_jobs_give_way_before_others(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        for number, owner in enumerate(("you", "me", "me")):
            fail(store, f"ftjob-{number}", 1e4 * number, owner=owner)
        create(store, "ftjob-3", now=5e4, max_live=3)
        assert kept(store, 5e4) == ["ftjob-0", "ftjob-2"]
        create(store, "ftjob-4", owner="them", now=5e4, max_live=3)
        assert kept(store, 5e4) == ["ftjob-2"]


def test_failed_jobs_of_whole_models_give_way_to_those_that_would_be_one_too_many(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        fail(store, "ftjob-0", 0.0)
        for number in (1, 2):
            fail(store, f"ftjob-{number}", 1e4 * number, hyperparameters=FULL)
        create(store, "ftjob-3", now=5e4, max_full=2)  # of an adapter
        assert kept(store, 5e4) == ["ftjob-0", "ftjob-1", "ftjob-2"]
        create(store, "ftjob-4", now=5e4, hyperparameters=FULL, max_full=3, models=lambda: {"ftjob-made"})
        assert kept(store, 5e4) == ["ftjob-0", "ftjob-2"]


def test_a_failed_job_that_keeps_nothing_any_more_counts_no_longer(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        fail(store, "ftjob-0", 0.0)
        later = KEPT_SECONDS + 1e4
        fail(store, "ftjob-1", later, max_live=2)
        create(store, "ftjob-2", now=later, max_live=2)
        assert kept(store, later) == ["ftjob-1"]
        assert GIVEN_UP not in messages(store, "ftjob-0")
