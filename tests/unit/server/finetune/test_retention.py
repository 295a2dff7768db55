"""How large the store of jobs becomes: events of a job are bounded, and jobs without a model are forgotten."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from job_makers import create, leases, step, training
from working import Run, Work

from server.finetune import retention
from server.finetune.feed import follow
from server.finetune.journal import FIRST_EVENTS, TRIM_EVERY
from server.finetune.records import KEPT_SECONDS, Failure, Hyperparameters
from server.finetune.store import JobStore
from server.finetune.writer import Writer

DAY = 86400.0
MOST = 300

pytestmark = pytest.mark.timeout(180)


def count(store: JobStore, table: str, job_id: str = "ftjob-1") -> int:
    column = "id" if table == "jobs" else "job_id"
    (rows,) = store.connection.execute(f"SELECT count(*) FROM {table} WHERE {column} = ?", (job_id,)).fetchone()
    return int(rows)


def numbers(store: JobStore, job_id: str = "ftjob-1") -> list[int]:
    events = store.journal.events(job_id, after=0, before=None, limit=10_000)
    return [int(event.message) for event in events if event.message.isdecimal()]


def say(store: JobStore, first: int, last: int, *job_ids: str) -> None:
    with store.transaction():
        for number in range(first, last):
            for job_id in job_ids or ("ftjob-1",):
                store.journal.say(job_id, 1.0, str(number))


def test_the_first_events_of_a_job_and_the_newest_are_kept(tmp_path: Path) -> None:
    store = JobStore(tmp_path / "jobs.sqlite3", max_events=MOST)
    most = 0
    for number in range(3 * MOST):
        say(store, number, number + 1, "ftjob-1", "ftjob-2")
        most = max(most, count(store, "events"))
    assert MOST - TRIM_EVERY < most <= MOST
    for job_id in ("ftjob-1", "ftjob-2"):
        kept = numbers(store, job_id)
        assert kept[:FIRST_EVENTS] == list(range(FIRST_EVENTS))
        newest = kept[FIRST_EVENTS:]
        assert newest == list(range(3 * MOST - len(newest), 3 * MOST))
        assert len(newest) >= MOST - FIRST_EVENTS - TRIM_EVERY
    store.close()


def test_who_saw_an_event_that_was_trimmed_goes_on_behind_it(tmp_path: Path) -> None:
    store = JobStore(tmp_path / "jobs.sqlite3", max_events=MOST)
    begin, ids = 1_795_000_000.0, []
    for number in range(3 * MOST):
        with store.transaction():
            store.journal.say("ftjob-1", begin + number / 100, str(number))
        ids.append(store.journal.events("ftjob-1", after=None, before=None, limit=1)[0].id)
    kept = numbers(store)
    for seen in (FIRST_EVENTS, MOST, kept[FIRST_EVENTS] - 1):
        assert seen not in kept
        place = store.journal.event_place("ftjob-1", ids[seen])
        behind = store.journal.events("ftjob-1", after=place, before=None, limit=10_000)
        assert [int(event.message) for event in behind] == kept[FIRST_EVENTS:]
        older = store.journal.events("ftjob-1", after=None, before=place, limit=2)
        assert [int(event.message) for event in older] == [FIRST_EVENTS - 1, FIRST_EVENTS - 2]
    times = (begin - 1, begin + 0.005, begin + (kept[-1] - 1) / 100 + 0.005, begin + 3 * MOST)
    strangers = [f"ftevent-{int(at * 1000):012x}{'0' * 20}" for at in times]
    for none in ("ftevent-none", *strangers, f"{ids[MOST]}0", ids[MOST].upper()):
        assert store.journal.event_place("ftjob-1", none) is None
    assert store.journal.event_place("ftjob-2", ids[MOST]) is None
    store.close()


def test_a_job_that_has_few_events_keeps_them_all(tmp_path: Path) -> None:
    store = JobStore(tmp_path / "jobs.sqlite3", max_events=MOST)
    say(store, 0, MOST - TRIM_EVERY)
    assert numbers(store) == list(range(MOST - TRIM_EVERY))
    store.close()


def test_what_came_before_there_was_a_limit_goes_little_by_little(tmp_path: Path) -> None:
    store = JobStore(tmp_path / "jobs.sqlite3", max_events=10_000)
    say(store, 0, 4000)
    store.close()
    store = JobStore(tmp_path / "jobs.sqlite3", max_events=MOST)
    say(store, 4000, 4001)
    assert count(store, "events") == 3001
    say(store, 4001, 4000 + 5 * TRIM_EVERY)
    assert count(store, "events") <= MOST
    assert numbers(store)[-1] == 4000 + 5 * TRIM_EVERY - 1
    store.close()


def finished(store: JobStore, name: str, *, full: bool = False) -> None:
    """A job that has a model, after four steps and two checkpoints."""
    changes = {"hyperparameters": Hyperparameters(training_type="full")} if full else {}
    create(store, name, **changes)
    held = leases(store)
    job = training(store, held)
    for number in range(1, 5):
        held.stepped(job, 103.0, step(number), 4, checkpoint=number % 2 == 0)
    held.succeeded(job, 104.0, model=f"ft:base::{name}", trained_tokens=40, result_file=None, notes=[])


def failed(store: JobStore, name: str, *, resumable: bool) -> None:
    create(store, name)
    held = leases(store)
    held.failed(training(store, held), 104.0, Failure("trainer_crashed", "it crashed", resumable=resumable))


def everything(store: JobStore, now: float, days: float = 30.0, models: tuple[str, ...] = ()) -> set[str]:
    """Forgets what there is to forget; the jobs that are left."""
    while retention.forget_jobs(store, now, days * DAY, set(models)):
        pass
    return {job_id for (job_id,) in store.connection.execute("SELECT id FROM jobs")}


@pytest.fixture
def store(tmp_path: Path) -> JobStore:
    return JobStore(tmp_path / "jobs.sqlite3")


def test_jobs_without_a_model_are_forgotten_with_all_their_rows(store: JobStore) -> None:
    for name in ("ftjob-adapter", "ftjob-deleted"):
        finished(store, name)
    for name in ("ftjob-whole", "ftjob-moved"):
        finished(store, name, full=True)
    store.remove_adapter("ft:base::ftjob-deleted")
    failed(store, "ftjob-failed", resumable=False)
    create(store, "ftjob-cancelled")
    store.cancel("ftjob-cancelled", 104.0)
    create(store, "ftjob-waiting")
    everything(store, 104.0 + 30 * DAY, models=("ftjob-whole",))
    assert count(store, "jobs", "ftjob-failed") == 1  # not a moment too early
    left = everything(store, 105.0 + 30 * DAY, models=("ftjob-whole",))
    assert left == {"ftjob-adapter", "ftjob-whole", "ftjob-waiting"}
    for table in ("events", "steps", "checkpoints"):
        jobs = {job_id for (job_id,) in store.connection.execute(f"SELECT DISTINCT job_id FROM {table}")}
        assert jobs == (left if table == "events" else left - {"ftjob-waiting"})


def test_a_job_that_can_be_resumed_is_not_forgotten(store: JobStore) -> None:
    failed(store, "ftjob-1", resumable=True)
    assert everything(store, 104.0 + KEPT_SECONDS, days=0.001) == {"ftjob-1"}
    assert store.get("ftjob-1").can_be_resumed(103.0 + KEPT_SECONDS)
    assert everything(store, 105.0 + KEPT_SECONDS, days=0.001) == set()


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 100])
def test_others_have_the_store_between_a_few_rows(store: JobStore, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(retention, "ROWS", rows)
    for name in ("ftjob-1", "ftjob-2"):
        finished(store, name)
        store.remove_adapter(f"ft:base::{name}")

    def all_rows() -> int:
        tables = ("jobs", "events", "steps", "checkpoints")
        return sum(store.connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables)

    before, more = all_rows(), True
    while more:
        more = retention.forget_jobs(store, 105.0 + 30 * DAY, 30 * DAY, set())
        assert before - all_rows() <= rows + 1
        before = all_rows()
    assert before == 0


def test_ended_jobs_keep_the_steps_of_their_checkpoints(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "ROWS", 1)
    finished(store, "ftjob-1")
    told = store.journal.checkpoints("ftjob-1", before_step=None, limit=10)
    assert [retention.forget_steps(store, "ftjob-1") for _ in range(3)] == [True, True, False]
    assert [one.step for one in store.journal.steps("ftjob-1")] == [2, 4]
    assert store.journal.checkpoints("ftjob-1", before_step=None, limit=10) == told


def test_a_feed_of_a_job_that_is_forgotten_ends(tmp_path: Path) -> None:
    async def main() -> None:
        writer = Writer(tmp_path / "jobs", "me", 1.0, 1.0)
        assert [event async for event in follow(writer, "ftjob-gone", 0)] == []
        await writer.close()

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("kept_days", [30.0, 0.0])
def test_a_server_forgets_as_it_tidies(run: Run, kept_days: float) -> None:
    async def main(work: Work) -> None:
        kept, cancelled = await work.create(), await work.create()
        await work.jobs.cancel(cancelled.id, "me")
        done = await work.succeeded(kept)
        await work.jobs.supervisor.tidy()
        writer = work.jobs._writer
        steps = await writer.store(lambda store: [one.step for one in store.journal.steps(kept.id)])
        assert steps == [2, 4, 6]  # those of its checkpoints
        clock: Callable[[], float] = writer.clock
        writer.clock = lambda: clock() + 31 * DAY
        await work.jobs.supervisor.tidy()
        assert await work.jobs.get(kept.id, "me") == done
        left = {job.id for job in await work.jobs.page("me", None, 10, {})}
        assert left == ({kept.id} if kept_days else {kept.id, cancelled.id})
        assert work.jobs.stats.jobs["cancelled"] == (0 if kept_days else 1)
        assert done.fine_tuned_model is not None
        adapter = await work.jobs.adapter(done.fine_tuned_model)
        assert adapter is not None
        await work.jobs.remove_adapter(adapter)
        await work.jobs.supervisor.tidy()
        assert work.jobs.stats.jobs["succeeded"] == (0 if kept_days else 1)

    run(main, kept_days=kept_days)


def test_a_server_keeps_as_many_events_as_it_is_told(run: Run) -> None:
    async def main(work: Work) -> None:
        await work.create()
        journal = await work.jobs._writer.store(lambda store: store.journal)
        assert journal._max_events == MOST

    run(main, max_events=MOST)
