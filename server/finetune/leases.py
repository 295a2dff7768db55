"""Who works on a job: a lease with a fencing token. Whoever lost it can write nothing. Blocking, for the store's
thread; must not know processes.

The token is `jobs.attempt`, which every claim and every cancellation raises. (Kleppmann, "How to do distributed
locking", 2016.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from server.finetune.records import Failure, Job, Status, Step
from server.finetune.setbacks import MAX_WAIT, Setbacks
from server.finetune.store import JobStore


class LeaseLostError(Exception):
    """Somebody else has the job, or it was cancelled."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One of the two pieces of work on a job, and the statuses in which it waits for somebody."""

    name: str
    takes: tuple[Status, ...]


VALIDATE = Stage("validate", (Status.VALIDATING,))
TRAIN = Stage("train", (Status.QUEUED, Status.RUNNING))


@dataclass(frozen=True, slots=True)
class Killed:
    """What a claim has found instead of a job to work on: one whose holder was killed. It waits, or has `failed`."""

    failed: bool


class Leases:
    """`holder`: a name for this server; `seconds`: how long a lease lasts without a beat; `back_off`: seconds after a
    first crash, twice as long after each one more; `is_gone`: whether the server of that name has certainly ended, so
    that its leases count no longer."""

    def __init__(
        self, store: JobStore, holder: str, seconds: float, back_off: float, is_gone: Callable[[str], bool]
    ) -> None:
        self._store = store
        self._connection = store.connection
        self._journal = store.journal
        self._holder = holder
        self._seconds = seconds
        self._setbacks = Setbacks(store, back_off)
        self._is_gone = is_gone

    def claim(self, stage: Stage, source: str, now: float) -> Job | Killed | None:
        """The oldest job of that base model that waits for the stage, now held by this server. One whose holder fell
        silent, or is gone, waits too: that is a setback, and it is not held before it has waited. A job that is to
        wait for longer than any does has been told so by a clock that was wrong."""
        waits = f"source = ? AND status IN ({_marks(stage.takes)})"
        with self._store.transaction():
            held = self._connection.execute(
                f"SELECT DISTINCT holder FROM jobs WHERE {waits} AND holder IS NOT NULL", (source, *stage.takes)
            )
            gone = [holder for (holder,) in held.fetchall() if self._is_gone(holder)]
            row = self._connection.execute(
                f"""SELECT id, holder FROM jobs WHERE {waits} AND (not_before <= ? OR not_before > ?)
                AND (lease_until IS NULL OR lease_until <= ? OR holder IN ({_marks(gone)}))
                ORDER BY sequence LIMIT 1""",
                (source, *stage.takes, now, now + max(MAX_WAIT, self._seconds), now, *gone),
            ).fetchone()
            if row is None:
                return None
            job_id, holder = row
            if holder is not None:
                failed = self._setbacks.killed(self._store.get(job_id), now)
                if not failed:
                    self._release(job_id, stage.takes[0])
                return Killed(failed)
            self._connection.execute(
                "UPDATE jobs SET attempt = attempt + 1, holder = ?, lease_until = ?, status = ? WHERE id = ?",
                (self._holder, now + self._seconds, Status.RUNNING if stage is TRAIN else Status.VALIDATING, job_id),
            )
            return self._store.get(job_id)

    def beat(self, job: Job, now: float) -> Status:
        """Holds the job for longer. What its owner wants of it meanwhile is the returned status."""
        with self._store.transaction():
            held = self._held(job)
            self._connection.execute("UPDATE jobs SET lease_until = ? WHERE id = ?", (now + self._seconds, job.id))
            return held.status

    def started(self, job: Job, now: float, device: str) -> None:
        with self._store.transaction():
            done = self._connection.execute("SELECT checkpoint_step FROM jobs WHERE id = ?", (job.id,)).fetchone()[0]
            self._held(job)
            text = "Fine-tuning job started" if not done else f"Fine-tuning job goes on after step {done}"
            self._journal.say(job.id, now, f"{text} on {device}")

    def validated(self, job: Job, now: float, plan: str, total_steps: int, summary: str) -> None:
        with self._store.transaction():
            status = self._held(job).status
            self._connection.execute(
                "UPDATE jobs SET plan = ?, total_steps = ? WHERE id = ?", (plan, total_steps, job.id)
            )
            self._journal.say(job.id, now, summary)
            if status is Status.VALIDATING:
                self._journal.say(job.id, now, "Files validated, moving job to queued state")
                status = Status.QUEUED
            self._release(job.id, status, crashes=0)

    def stepped(self, job: Job, now: float, step: Step, total: int, *, checkpoint: bool) -> Status:
        """Records a step, and a checkpoint with it. The returned status is what the owner wants meanwhile."""
        with self._store.transaction():
            held = self._held(job)
            missing = step.step - self._journal.last_step(job.id) - 1
            if missing > 0:
                text = f"The metrics of {missing} steps before step {step.step} were lost when the server was killed"
                self._journal.say(job.id, now, text, "warn")
            self._journal.record(job.id, now, step, total)
            left = (total - step.step) * step.seconds
            self._connection.execute(
                "UPDATE jobs SET total_steps = ?, estimated_finish = ?, lease_until = ? WHERE id = ?",
                (total, now + left if held.status is Status.RUNNING else None, now + self._seconds, job.id),
            )
            if checkpoint:
                self._journal.add_checkpoint(job.id, now, step.step)
                self._connection.execute(
                    """UPDATE jobs SET crashes = CASE WHEN checkpoint_step < ? THEN 0 ELSE crashes END,
                    checkpoint_step = max(checkpoint_step, ?) WHERE id = ?""",
                    (step.step, step.step, job.id),
                )
            return held.status

    def trained(self, job: Job, now: float, tokens: int) -> None:
        """There is a result, of so many trained tokens: whatever happens next, no trainer has to tell that again."""
        with self._store.transaction():
            self._held(job)
            self._connection.execute(
                "UPDATE jobs SET trained_tokens = ?, lease_until = ? WHERE id = ?",
                (tokens, now + self._seconds, job.id),
            )

    def stopped(self, job: Job, not_before: float = 0.0) -> None:
        """Nobody works on it any more, and nothing went wrong: it waits, or is paused."""
        with self._store.transaction():
            status = self._held(job).status
            self._connection.execute("UPDATE jobs SET not_before = ? WHERE id = ?", (not_before, job.id))
            self._release(job.id, Status.QUEUED if status is Status.RUNNING else status)

    def no_room(self, job: Job, now: float, reason: str) -> None:
        """Nobody works on it for a while, and nothing is lost."""
        with self._store.transaction():
            held = self._held(job)
            self._setbacks.no_room(held, reason, now)
            self._release(job.id, Status.QUEUED if held.status is Status.RUNNING else held.status)

    def out_of_memory(self, job: Job, now: float, reason: str, *, answering: bool) -> bool:
        """Whether that was once too often, so that the job has failed. `answering`: whether requests were open."""
        with self._store.transaction():
            held = self._held(job)
            failed = self._setbacks.out_of_memory(held, reason, now, answering=answering)
            if not failed:
                self._release(job.id, Status.QUEUED if held.status is Status.RUNNING else held.status)
            return failed

    def crashed(self, job: Job, now: float, reason: str) -> bool:
        """Whether that was once too often, so that the job has failed."""
        with self._store.transaction():
            held = self._held(job)
            failed = self._setbacks.crashed(held, reason, now)
            if not failed:
                self._release(job.id, Status.QUEUED if held.status is Status.RUNNING else held.status)
            return failed

    def publish_later(self, job: Job, now: float, reason: str) -> None:
        """There is a result, and nobody works on it for a while."""
        with self._store.transaction():
            held = self._held(job)
            self._setbacks.publish_later(held, reason, now)
            self._release(job.id, Status.QUEUED if held.status is Status.RUNNING else held.status)

    def failed(self, job: Job, now: float, failure: Failure) -> None:
        with self._store.transaction():
            self._held(job)
            self._setbacks.fail(job.id, failure, now)

    def succeeded(
        self, job: Job, now: float, *, model: str, trained_tokens: int, result_file: str | None, notes: list[str]
    ) -> None:
        """`notes`: what the owner should know, as warnings. An adapter is from now on served under the name `model`."""
        with self._store.transaction():
            self._held(job)
            self._connection.execute(
                """UPDATE jobs SET status = ?, finished_at = ?, estimated_finish = NULL, fine_tuned_model = ?,
                trained_tokens = ?, result_file = ?, holder = NULL, lease_until = NULL WHERE id = ?""",
                (Status.SUCCEEDED, now, model, trained_tokens, result_file, job.id),
            )
            if not job.request.is_full:
                self._connection.execute(
                    "INSERT OR REPLACE INTO adapters (name, owner, job_id, source, created_at) VALUES (?, ?, ?, ?, ?)",
                    (model, job.owner, job.id, job.source, now),
                )
            for note in notes:
                self._journal.say(job.id, now, note, "warn")
            self._journal.say(job.id, now, f"New fine-tuned model created: {model}")
            if job.request.is_full:
                text = f"It is a whole model, in finetune/models/{job.id} of the server's data directory"
                self._journal.say(job.id, now, f"{text}: `longwave serve --model` with that folder serves it")
            self._journal.say(job.id, now, "The job has successfully completed")

    def _held(self, job: Job) -> Job:
        row = self._connection.execute(
            "SELECT 1 FROM jobs WHERE id = ? AND attempt = ? AND holder = ?", (job.id, job.attempt, self._holder)
        ).fetchone()
        if row is None:
            raise LeaseLostError(f"{job.id} is no longer held in attempt {job.attempt}")
        return self._store.get(job.id)

    def _release(self, job_id: str, status: Status, crashes: int | None = None) -> None:
        self._connection.execute(
            """UPDATE jobs SET status = ?, holder = NULL, lease_until = NULL, estimated_finish = NULL,
            crashes = coalesce(?, crashes) WHERE id = ?""",
            (status, crashes, job_id),
        )


def _marks(values: Sequence[str]) -> str:
    return ", ".join("?" * len(values))
