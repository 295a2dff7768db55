"""What of ended jobs is forgotten in SQL, a few rows at a time: whoever else wants the store gets it between them. Must
not know files or HTTP."""

from server.finetune.records import FINAL, KEPT_SECONDS
from server.finetune.store import JobStore

ROWS = 2000  # of one transaction
ENDED = ", ".join(f"'{status}'" for status in sorted(FINAL))
#: Of each table, what tells the rows of a job apart.
KEYS = {"events": "sequence", "steps": "step", "checkpoints": "step"}
OF_NO_CHECKPOINT = (
    "NOT EXISTS (SELECT 1 FROM checkpoints WHERE checkpoints.job_id = steps.job_id AND checkpoints.step = steps.step)"
)


def forget_steps(store: JobStore, job_id: str) -> bool:
    """Of a job that has ended for good, and whose result file has them: those of no checkpoint, which nobody can ask
    for. Whether there may be more."""
    with store.transaction():
        return _delete(store, "steps", job_id, ROWS, OF_NO_CHECKPOINT) == ROWS


def forget_jobs(store: JobStore, now: float, seconds: float, models: set[str]) -> bool:
    """All of a job that ended so many seconds ago, has left no model and cannot be resumed. `models` names the jobs
    whose whole models are on the disk. Whether there may be more."""
    before = now - max(seconds, KEPT_SECONDS)
    rows = store.connection.execute(
        f"""SELECT id FROM jobs WHERE status IN ({ENDED}) AND finished_at < ?
        AND NOT EXISTS (SELECT 1 FROM adapters WHERE job_id = jobs.id) ORDER BY finished_at""",
        (before,),
    )
    expired = [job_id for (job_id,) in rows if job_id not in models]
    left = ROWS
    with store.transaction():
        for job_id in expired:
            for table in KEYS:
                left -= _delete(store, table, job_id, left)
            if left <= 0:
                return True
            store.connection.execute("DELETE FROM jobs WHERE id = ?", (job_id,))
            left -= 1
    return False


def _delete(store: JobStore, table: str, job_id: str, most: int, which: str = "TRUE") -> int:
    """How many rows that were."""
    key = KEYS[table]
    return store.connection.execute(
        f"""DELETE FROM {table} WHERE job_id = ? AND {key} IN
        (SELECT {key} FROM {table} WHERE job_id = ? AND {which} LIMIT ?)""",
        (job_id, job_id, most),
    ).rowcount
