"""How many jobs there may be: those that live and, with them, failed ones whose checkpoints are kept. These keep no new
job out: they give way. Blocking, for the store's thread; must not know who trains, HTTP, or files."""

import sqlite3
from collections.abc import Callable

from server.finetune.journal import Journal
from server.finetune.records import FINAL, KEPT_SECONDS, Job, JobRequest, Status

LIVE = "status IN ({})".format(", ".join(f"'{status}'" for status in Status if status not in FINAL))
KEPT = f"status = '{Status.FAILED}' AND json_extract(failure, '$.resumable') AND finished_at > ?"
FULL = "json_extract(request, '$.hyperparameters.training_type') = 'full'"
GIVEN_UP = "The checkpoint was given up for a newer job: the job cannot be resumed any more."


class TooManyModelsError(Exception):
    """As many fully tuned models are kept, or being made, as there may be."""


class Places:
    """Used inside the caller's transaction. `models` names the jobs whose whole models are on the disk."""

    def __init__(self, connection: sqlite3.Connection, journal: Journal) -> None:
        self._connection = connection
        self._journal = journal

    def has_one(self, request: JobRequest, max_live: int, max_full: int, models: Callable[[], set[str]]) -> bool:
        """Raises TooManyModelsError."""
        if len(self._ids(LIVE)) >= max_live:
            return False
        if request.is_full and len(models() | self._live_full()) >= max_full:
            raise TooManyModelsError
        return True

    def give_way(self, job: Job, now: float, max_live: int, max_full: int, models: Callable[[], set[str]]) -> None:
        """To a new job, which is there already: what failed jobs keep beyond a limit is given up, the owner's before
        others', and the oldest first."""
        self._give_up(KEPT, job.owner, now, max_live - len(self._ids(LIVE)))
        if job.request.is_full:
            self._give_up(f"{KEPT} AND {FULL}", job.owner, now, max_full - len(models() | self._live_full()))

    def _give_up(self, which: str, owner: str, now: float, most: int) -> None:
        kept = self._ids(f"{which} ORDER BY owner != ?, finished_at, sequence", now - KEPT_SECONDS, owner)
        for job_id in kept[: max(0, len(kept) - max(0, most))]:
            self._connection.execute(
                """UPDATE jobs SET failure = json_set(failure, '$.resumable', json('false'),
                '$.message', json_extract(failure, '$.message') || ' ' || ?) WHERE id = ?""",
                (GIVEN_UP, job_id),
            )
            self._journal.say(job_id, now, GIVEN_UP, "warn")

    def _live_full(self) -> set[str]:
        return set(self._ids(f"{LIVE} AND {FULL}"))

    def _ids(self, which: str, *values: object) -> list[str]:
        return [name for (name,) in self._connection.execute(f"SELECT id FROM jobs WHERE {which}", values)]
