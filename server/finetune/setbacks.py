"""What goes wrong with a job: how long it waits then, and when that was once too often. Must not know who may say so:
server.finetune.leases does. A job whose training is done is never given up: what is left of it is publishing."""

import msgspec

from server.finetune.records import KEPT_SECONDS, Failure, Job, Status
from server.finetune.store import JobStore

MAX_CRASHES = 4  # in a row, without a new checkpoint between them
MAX_BACK_OFF = 60.0
MIN_WAIT, MAX_WAIT = 10.0, 300.0  # seconds of a job for which there is no room
BUSY_SECONDS = 1200.0  # without a checkpoint, after which open requests are no excuse for too little memory
LESS = (
    "A new job needs less with shorter examples, a lower lora.rank, training_type lora instead of full, or forwards of "
    "fewer tokens (--fine-tuning-batch-tokens). This one needs a device with more memory, or on a GPU an engine that "
    "takes less of it (--gpu-memory-utilization)"
)


class Setbacks:
    """Used inside the caller's transaction. `back_off`: seconds after a first crash, twice as long after each more."""

    def __init__(self, store: JobStore, back_off: float) -> None:
        self._connection = store.connection
        self._journal = store.journal
        self._back_off = back_off

    def killed(self, job: Job, now: float) -> bool:
        """Its server or its trainer was. Whether the job has failed."""
        reason = "The server or its trainer was killed"
        if job.is_trained:  # also between its last checkpoint and its result, which is made of that
            self.publish_later(job, reason, now)
            return False
        return self._count(job, reason, now)

    def crashed(self, job: Job, reason: str, now: float) -> bool:
        """Whether that was once too often, so that the job has failed."""
        if job.trained_tokens is not None:  # there is a result
            self.publish_later(job, reason, now)
            return False
        return self._count(job, reason, now)

    def no_room(self, job: Job, reason: str, now: float) -> None:
        """It waits for as long again as it has made no checkpoint, within bounds, so that waits grow whoever works on
        it, and loses nothing."""
        self._wait_for_room(job, reason, now, None)

    def out_of_memory(self, job: Job, reason: str, now: float, *, answering: bool) -> bool:
        """Whether that was once too often, so that the job has failed. With a checkpoint, and while others are answered
        (for so long), it is no more than a wait."""
        last = self._journal.last_checkpoint(job.id)
        if last is not None and answering and now - last < BUSY_SECONDS:
            self._wait_for_room(job, f"{reason}, while requests are answered", now, None)
            return False
        tried = job.crashes + 1
        if tried >= MAX_CRASHES:
            text = f"{reason}. It was tried {tried} times without a new checkpoint. {LESS}."
            self._give_up(job, "out_of_memory", text, now)
            return True
        counted = f"{reason} (attempt {tried} of {MAX_CRASHES})"
        if last is not None:
            self._wait_for_room(job, counted, now, tried)
        else:
            self._journal.say(job.id, now, counted, "warn")
            self._wait(job, now + self._next_back_off(tried), tried)
        return False

    def publish_later(self, job: Job, reason: str, now: float) -> None:
        wait = self._next_back_off(job.crashes + 1)
        text = f"{reason}. The training is done and kept; what is left of the job is tried again in {wait:.0f} s"
        self._journal.say(job.id, now, text, "warn")
        self._wait(job, now + wait, job.crashes + 1)

    def fail(self, job_id: str, failure: Failure, now: float) -> None:
        self._connection.execute(
            """UPDATE jobs SET status = ?, finished_at = ?, estimated_finish = NULL, failure = ?, holder = NULL,
            lease_until = NULL WHERE id = ?""",
            (Status.FAILED, now, msgspec.json.encode(failure).decode(), job_id),
        )
        self._journal.say(job_id, now, failure.message, "error")

    def _count(self, job: Job, reason: str, now: float) -> bool:
        crashes = job.crashes + 1
        self._journal.say(job.id, now, f"{reason} (crash {crashes} of {MAX_CRASHES} without a new checkpoint)", "warn")
        if crashes >= MAX_CRASHES:
            text = f"The trainer crashed {crashes} times without a new checkpoint; the last time: {reason}."
            self._give_up(job, "trainer_crashed", text, now)
            return True
        self._wait(job, now + self._next_back_off(crashes), crashes)
        return False

    def _give_up(self, job: Job, code: str, text: str, now: float) -> None:
        """What has a checkpoint keeps it for a while."""
        resumable = job.checkpoint_step > 0
        if resumable:
            days = round(KEPT_SECONDS / 86400)
            text += f" The checkpoint of step {job.checkpoint_step} is kept for {days} days: the job can be resumed."
        self.fail(job.id, Failure(code, text, resumable=resumable), now)

    def _wait_for_room(self, job: Job, reason: str, now: float, crashes: int | None) -> None:
        wait = min(MAX_WAIT, max(MIN_WAIT, now - (self._journal.last_checkpoint(job.id) or job.created_at)))
        self._journal.say(job.id, now, f"{reason}. The job waits, and is tried again in {wait:.0f} s", "warn")
        self._wait(job, now + wait, crashes)

    def _next_back_off(self, crashes: int) -> float:
        return min(MAX_BACK_OFF, self._back_off * 2.0 ** min(crashes - 1, 30))

    def _wait(self, job: Job, not_before: float, crashes: int | None = None) -> None:
        self._connection.execute(
            "UPDATE jobs SET not_before = ?, crashes = coalesce(?, crashes) WHERE id = ?", (not_before, crashes, job.id)
        )
