"""Jobs and finished adapters in SQL, as their owners see and change them. Blocking, for one thread; must not know who
trains (server.finetune.leases does), HTTP, or files."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from server.finetune.database import connect
from server.finetune.journal import Journal
from server.finetune.places import Places
from server.finetune.records import MAX_EVENTS, Adapter, Failure, Job, JobRequest, Status

COLUMNS = (
    "id, owner, source, request, seed, status, created_at, finished_at, estimated_finish, plan, total_steps, "
    "trained_tokens, fine_tuned_model, result_file, failure, attempt, crashes, checkpoint_step"
)


class WrongStatusError(Exception):
    """The job is in a status in which that cannot be done; the job is the argument."""

    def __init__(self, job: Job) -> None:
        super().__init__(job.status)
        self.job = job


class JobStore:
    def __init__(self, path: Path, max_events: int = MAX_EVENTS, *, had_jobs: bool = False) -> None:
        """`max_events`: of one job. `had_jobs`: the file, which therefore cannot be new. Raises DatabaseError,
        sqlite3.Error."""
        self.connection = connect(path, had_jobs=had_jobs)
        self.journal = Journal(self.connection, max_events)
        self._places = Places(self.connection, self.journal)

    def close(self) -> None:
        self.connection.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing, and nobody else writes between its reads and its writes."""
        with self.connection:
            self.connection.execute("BEGIN IMMEDIATE")
            yield

    def create(
        self, job_id: str, owner: str, source: str, request: JobRequest, seed: int, now: float, key: str | None,
        max_live: int, max_full: int, models: Callable[[], set[str]],
    ) -> Job | None:  # fmt: skip
        """The new job, or the one that the owner's idempotency key made before; None when `max_live` jobs live. Raises
        TooManyModelsError for one that tunes fully when `max_full` such jobs live or have left a model: `models` names
        the jobs whose models are on the disk, where a job's is shortly before it has ended. What failed jobs keep
        counts in both limits, and is given up where it would pass one."""
        with self.transaction():
            known = None if key is None else self.sent_before(owner, key)
            if known is not None:
                return known
            if not self._places.has_one(request, max_live, max_full, models):
                return None
            self.connection.execute(
                """INSERT INTO jobs (id, owner, idempotency_key, source, request, seed, status, created_at)
                VALUES (?, ?, ?, ?, ?, ?, ?, ?)""",
                (job_id, owner, key, source, _json(request), seed, Status.VALIDATING, now),
            )
            files = f"training file: {request.training_file}"
            if request.validation_file is not None:
                files += f" and validation file: {request.validation_file}"
            self.journal.say(job_id, now, f"Created fine-tuning job: {job_id}")
            self.journal.say(job_id, now, f"Validating {files}")
            made = self.get(job_id)
            self._places.give_way(made, now, max_live, max_full, models)
            return made

    def known(self, job_id: str) -> Job | None:
        return self._one("id = ?", job_id)

    def get(self, job_id: str) -> Job:
        job = self.known(job_id)
        assert job is not None
        return job

    def find(self, job_id: str, owner: str) -> Job | None:
        return self._one("id = ? AND owner = ?", job_id, owner)

    def sent_before(self, owner: str, key: str) -> Job | None:
        """The job that the owner's idempotency key made."""
        return self._one("owner = ? AND idempotency_key = ?", owner, key)

    def page(self, owner: str, after: str | None, limit: int, metadata: dict[str, str]) -> list[Job]:
        """The newest first, older than the job `after`; only those that have all of `metadata`."""
        pair = " AND EXISTS (SELECT 1 FROM json_each(request, '$.metadata') WHERE key = ? AND value = ?)"
        return self._all(
            f"""owner = ? AND (? IS NULL OR sequence < (SELECT sequence FROM jobs WHERE id = ?)){pair * len(metadata)}
            ORDER BY sequence DESC LIMIT ?""",
            owner, after, after, *(text for pair in metadata.items() for text in pair), limit,
        )  # fmt: skip

    def cancel(self, job_id: str, now: float) -> Job:
        """At once: whoever works on it has lost it. Raises WrongStatusError for a job that has ended otherwise."""
        with self.transaction():
            job = self.get(job_id)
            if job.status is Status.CANCELLED:
                return job
            if job.status.is_final and not job.can_be_resumed(now):
                raise WrongStatusError(job)
            self.connection.execute(
                """UPDATE jobs SET status = ?, finished_at = ?, estimated_finish = NULL, holder = NULL,
                lease_until = NULL, attempt = attempt + 1 WHERE id = ?""",
                (Status.CANCELLED, now, job_id),
            )
            self.journal.say(job_id, now, "The job was cancelled")
            return self.get(job_id)

    def pause(self, job_id: str, now: float) -> Job:
        """A trainer that runs it keeps its lease until it has written a checkpoint."""
        with self.transaction():
            job = self.get(job_id)
            if job.status is Status.PAUSED:
                return job
            if job.status.is_final:
                raise WrongStatusError(job)
            self._move(job_id, Status.PAUSED)
            self.journal.say(job_id, now, "The job was paused")
            return self.get(job_id)

    def resume(self, job_id: str, now: float) -> Job:
        with self.transaction():
            job = self.get(job_id)
            if job.status is not Status.PAUSED:
                raise WrongStatusError(job)
            return self._resumed(job, now)

    def resume_failed(
        self, job_id: str, now: float, max_live: int, max_full: int, models: Callable[[], set[str]]
    ) -> Job | None:
        """One that has failed with a checkpoint, which is kept. It needs a place again: None and TooManyModelsError as
        for `create`."""
        with self.transaction():
            job = self.get(job_id)
            if not job.can_be_resumed(now):
                raise WrongStatusError(job)
            if not self._places.has_one(job.request, max_live, max_full, models):
                return None
            self.connection.execute(
                "UPDATE jobs SET finished_at = NULL, failure = NULL, crashes = 0 WHERE id = ?", (job_id,)
            )
            return self._resumed(job, now)

    def has_ended(self, job_id: str) -> bool | None:
        """None for a job that is not there."""
        job = self.known(job_id)
        return None if job is None else job.status.is_final

    def has_succeeded(self, job_id: str) -> bool:
        job = self.known(job_id)
        return job is not None and job.status is Status.SUCCEEDED

    def tuned(self, model: str, owner: str) -> Job | None:
        """The job that made the owner's model of that name."""
        return self._one("fine_tuned_model = ? AND owner = ? AND status = ?", model, owner, Status.SUCCEEDED)

    def counts(self) -> dict[str, int]:
        """How many jobs there are of each status, of all owners."""
        found = dict(self.connection.execute("SELECT status, count(*) FROM jobs GROUP BY status").fetchall())
        return {status.value: found.get(status.value, 0) for status in Status}

    def adapters(self, source: str) -> list[Adapter]:
        """Of one base model, the oldest first."""
        rows = self.connection.execute(
            "SELECT name, owner, job_id, source, created_at FROM adapters WHERE source = ? ORDER BY created_at, name",
            (source,),
        )
        return [Adapter(*row) for row in rows]

    def adapter(self, name: str) -> Adapter | None:
        row = self.connection.execute(
            "SELECT name, owner, job_id, source, created_at FROM adapters WHERE name = ?", (name,)
        ).fetchone()
        return None if row is None else Adapter(*row)

    def remove_adapter(self, name: str) -> None:
        with self.transaction():
            self.connection.execute("DELETE FROM adapters WHERE name = ?", (name,))

    def holds_adapter_of(self, job_id: str) -> bool:
        return self.connection.execute("SELECT 1 FROM adapters WHERE job_id = ?", (job_id,)).fetchone() is not None

    def _move(self, job_id: str, status: Status) -> None:
        self.connection.execute(
            "UPDATE jobs SET status = ?, estimated_finish = NULL, not_before = 0 WHERE id = ?", (status, job_id)
        )

    def _resumed(self, job: Job, now: float) -> Job:
        self._move(job.id, Status.VALIDATING if job.plan is None else Status.QUEUED)
        self.journal.say(job.id, now, "The job was resumed")
        return self.get(job.id)

    def _one(self, where: str, *values: Any) -> Job | None:
        return next(iter(self._all(where, *values)), None)

    def _all(self, where: str, *values: Any) -> list[Job]:
        return [job_of(row) for row in self.connection.execute(f"SELECT {COLUMNS} FROM jobs WHERE {where}", values)]


def job_of(row: tuple[Any, ...]) -> Job:
    """A row of COLUMNS."""
    job_id, owner, source, request, seed, status, *times, failure, attempt, crashes, checkpoint_step = row
    created_at, finished_at, estimated_finish, plan, total_steps, trained_tokens, model, result_file = times
    return Job(
        id=job_id,
        owner=owner,
        source=source,
        request=msgspec.json.decode(request, type=JobRequest),
        seed=seed,
        status=Status(status),
        created_at=created_at,
        finished_at=finished_at,
        estimated_finish=estimated_finish,
        plan=plan,
        total_steps=total_steps,
        trained_tokens=trained_tokens,
        fine_tuned_model=model,
        result_file=result_file,
        failure=None if failure is None else msgspec.json.decode(failure, type=Failure),
        attempt=attempt,
        crashes=crashes,
        checkpoint_step=checkpoint_step,
    )


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
