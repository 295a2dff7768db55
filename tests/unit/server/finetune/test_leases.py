"""A job is worked on by one server at a time, and whoever lost it writes nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from job_makers import LEASE, MODEL, PLAN, create, leases, messages, opened, step, training, validated

from server.finetune.leases import TRAIN, VALIDATE, Killed, LeaseLostError, Leases
from server.finetune.records import Failure, Job, Status
from server.finetune.setbacks import MAX_CRASHES

WRITES: dict[str, Callable[[Leases, Job], Any]] = {
    "beat": lambda held, job: held.beat(job, 300.0),
    "started": lambda held, job: held.started(job, 300.0, "cpu"),
    "validated": lambda held, job: held.validated(job, 300.0, PLAN, 4, "x"),
    "stepped": lambda held, job: held.stepped(job, 300.0, step(3), 4, checkpoint=True),
    "stopped": lambda held, job: held.stopped(job),
    "crashed": lambda held, job: held.crashed(job, 300.0, "x"),
    "no room": lambda held, job: held.no_room(job, 300.0, "x"),
    "trained": lambda held, job: held.trained(job, 300.0, 10),
    "failed": lambda held, job: held.failed(job, 300.0, Failure("c", "m")),
    "succeeded": lambda held, job: held.succeeded(
        job, 300.0, model="ft:x", trained_tokens=1, result_file=None, notes=[]
    ),
}


def everything(store: Any) -> list[Any]:
    tables = ("jobs", "events", "steps", "checkpoints", "adapters")
    return [store.connection.execute(f"SELECT * FROM {table}").fetchall() for table in tables]


def test_a_job_is_given_to_one_of_two_servers(tmp_path: Path) -> None:
    with opened(tmp_path) as one, opened(tmp_path) as other:
        create(one)
        first = leases(one, "server-a").claim(VALIDATE, MODEL, 100.0)
        assert first is not None
        assert leases(other, "server-b").claim(VALIDATE, MODEL, 100.0 + LEASE / 2) is None


def test_jobs_are_given_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        for number in range(3):
            create(store, f"ftjob-{number}")
        held = leases(store)
        taken = [held.claim(VALIDATE, MODEL, 100.0) for _ in range(4)]
        assert [job and job.id for job in taken] == ["ftjob-0", "ftjob-1", "ftjob-2", None]


def test_a_server_takes_jobs_of_its_own_base_model_only(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        create(store)
        assert leases(store).claim(VALIDATE, "another", 100.0) is None


def test_a_beat_holds_the_job_for_longer(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        create(store)
        held, other = leases(store, "server-a"), leases(store, "server-b")
        job = held.claim(VALIDATE, MODEL, 100.0)
        assert job is not None
        held.beat(job, 105.0)
        assert other.claim(VALIDATE, MODEL, 100.0 + LEASE) is None
        assert other.claim(VALIDATE, MODEL, 105.0 + LEASE) == Killed(failed=False)  # it waits a moment
        assert other.claim(VALIDATE, MODEL, 110.0 + LEASE) is not None


def test_a_lease_of_a_server_that_is_gone_counts_no_longer(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        create(store)
        create(store, "ftjob-2")
        assert leases(store, "server-a").claim(VALIDATE, MODEL, 100.0) is not None
        alive = leases(store, "server-b").claim(VALIDATE, MODEL, 100.0)
        assert alive is not None
        other = leases(store, "server-c", gone=["server-a"])
        assert other.claim(VALIDATE, MODEL, 100.0) == Killed(failed=False)  # it waits a moment
        assert "The server or its trainer was killed (crash 1 of 4 without a new checkpoint)" in messages(store)
        taken = other.claim(VALIDATE, MODEL, 101.0)
        assert taken is not None
        assert (taken.id, taken.attempt, taken.crashes) == ("ftjob-1", 2, 1)
        assert other.claim(VALIDATE, MODEL, 101.0) is None
        assert store.get(alive.id) == alive


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("how", ["taken over", "cancelled", "by another server"])
def test_whoever_lost_the_job_writes_nothing(tmp_path: Path, write: str, how: str) -> None:
    with opened(tmp_path) as store:
        create(store)
        held, other = leases(store, "server-a"), leases(store, "server-b")
        job = training(store, held)
        if how == "cancelled":
            store.cancel(job.id, 200.0)
        elif how == "taken over":
            assert other.claim(TRAIN, MODEL, 200.0) == Killed(failed=False)
            assert other.claim(TRAIN, MODEL, 210.0) is not None
        writer = other if how == "by another server" else held
        before = everything(store)
        with pytest.raises(LeaseLostError):
            WRITES[write](writer, job)
        assert everything(store) == before


@pytest.mark.parametrize("write", WRITES)
def test_an_earlier_attempt_of_the_same_server_writes_nothing(tmp_path: Path, write: str) -> None:
    with opened(tmp_path) as store:
        create(store)
        held = leases(store)
        stale = training(store, held)
        held.stopped(stale)
        assert held.claim(TRAIN, MODEL, 200.0) is not None
        before = everything(store)
        with pytest.raises(LeaseLostError):
            WRITES[write](held, stale)
        assert everything(store) == before


def test_validation_queues_the_job_unless_it_was_paused_meanwhile(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        create(store)
        held = leases(store)
        job = held.claim(VALIDATE, MODEL, 100.0)
        assert job is not None
        store.pause(job.id, 101.0)
        assert held.beat(job, 102.0) is Status.PAUSED
        held.validated(job, 103.0, PLAN, 4, "x")
        assert store.get(job.id).status is Status.PAUSED
        assert store.resume(job.id, 104.0).status is Status.QUEUED


def test_a_trainer_that_stops_gives_the_job_back_as_its_owner_wants_it(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        create(store)
        held = leases(store)
        job = training(store, held)
        held.stopped(job)
        assert store.get(job.id).status is Status.QUEUED
        job = held.claim(TRAIN, MODEL, 110.0)
        assert job is not None
        store.pause(job.id, 111.0)
        assert held.stepped(job, 112.0, step(1), 4, checkpoint=False) is Status.PAUSED  # what was under way is kept
        held.stopped(job)
        assert store.get(job.id).status is Status.PAUSED
        assert len(store.journal.steps(job.id)) == 1


def test_a_job_resumed_before_its_trainer_has_stopped_waits_for_it(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        create(store)
        held = leases(store)
        job = training(store, held)
        store.pause(job.id, 103.0)
        assert store.resume(job.id, 104.0).status is Status.QUEUED
        assert held.claim(TRAIN, MODEL, 105.0) is None
        held.stopped(job)
        again = held.claim(TRAIN, MODEL, 106.0)
        assert again is not None
        assert again.attempt == job.attempt + 1


def test_steps_that_are_trained_again_are_told_once(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        create(store)
        held = leases(store)
        job = training(store, held)
        for number in (1, 2, 3):
            held.stepped(job, 103.0, step(number), 4, checkpoint=number == 1)
        held.stopped(job)
        job = held.claim(TRAIN, MODEL, 104.0)
        assert job is not None
        for number in (1, 2, 3, 4):  # from its checkpoint on
            held.stepped(job, 105.0, step(number), 4, checkpoint=number == 1)
        told = [text for text in messages(store) if text.startswith("Step ")]
        assert told == [f"Step {number}/4: training loss={2 / number:.4f}" for number in (1, 2, 3, 4)]
        assert messages(store).count("Checkpoint created at step 1") == 1


def test_steps_that_nobody_heard_of_are_owned_up_to(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        create(store)
        held = leases(store)
        job = training(store, held)
        held.stepped(job, 103.0, step(1), 9, checkpoint=True)
        held.stepped(job, 103.0, step(5), 9, checkpoint=True)
        assert "The metrics of 3 steps before step 5 were lost when the server was killed" in messages(store)


def test_an_estimate_is_there_while_it_runs_only(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        create(store)
        held = leases(store)
        job = training(store, held)
        held.stepped(job, 103.0, step(1, seconds=2.0), 11, checkpoint=False)
        assert store.get(job.id).estimated_finish == 103.0 + 10 * 2.0
        store.pause(job.id, 104.0)
        held.stepped(job, 105.0, step(2), 11, checkpoint=False)
        assert store.get(job.id).estimated_finish is None


def crash(held: Leases, now: float) -> bool:
    job = held.claim(TRAIN, MODEL, now)
    assert job is not None
    return held.crashed(job, now, "The trainer was killed (SIGKILL)")


def test_crashes_wait_longer_and_longer(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        create(store)
        held = leases(store)
        validated(store, held)
        assert not crash(held, 200.0)
        assert held.claim(TRAIN, MODEL, 200.9) is None
        assert not crash(held, 201.0)
        assert held.claim(TRAIN, MODEL, 202.9) is None
        assert held.claim(TRAIN, MODEL, 203.0) is not None


def test_a_job_that_only_crashes_fails_with_the_reason(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        create(store)
        held = leases(store)
        validated(store, held)
        assert [crash(held, 1000.0 * number) for number in range(1, MAX_CRASHES + 1)] == [False] * (MAX_CRASHES - 1) + [
            True
        ]
        failed = store.get("ftjob-1")
        assert (failed.status, failed.failure and failed.failure.code) == (Status.FAILED, "trainer_crashed")
        assert failed.failure is not None
        assert "The trainer was killed (SIGKILL)" in failed.failure.message
        assert held.claim(TRAIN, MODEL, 1e6) is None


def test_a_new_checkpoint_forgives_earlier_crashes(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        create(store)
        held = leases(store)
        validated(store, held)
        for number in range(1, 3 * MAX_CRASHES):
            job = held.claim(TRAIN, MODEL, 1000.0 * number)
            assert job is not None
            held.stepped(job, 1000.0 * number, step(number), 99, checkpoint=True)
            assert not held.crashed(job, 1000.0 * number, "x")
        job = held.claim(TRAIN, MODEL, 1e6)
        assert job is not None
        held.stepped(job, 1e6, step(1), 99, checkpoint=True)  # an old checkpoint again is no progress
        assert store.get(job.id).crashes == 1


def test_a_server_that_is_killed_again_and_again_by_a_job_ends_it(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        create(store)
        validated(store, leases(store))
        assert leases(store, "server-0").claim(TRAIN, MODEL, 1000.0) is not None
        for number in range(1, MAX_CRASHES):
            started = leases(store, f"server-{number}")
            assert started.claim(TRAIN, MODEL, 1000.0 * number + 500) == Killed(failed=False)  # it waits a moment
            assert started.claim(TRAIN, MODEL, 1000.0 * number + 1000) is not None
        assert leases(store).claim(TRAIN, MODEL, 1e6) == Killed(failed=True)
        assert store.get("ftjob-1").status is Status.FAILED
