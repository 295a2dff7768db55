"""Events, steps and checkpoints of jobs in SQL. Must not know who may write them: server.finetune.leases does."""

import re
import secrets
import sqlite3
from typing import Any

import msgspec

from server.finetune.records import Checkpoint, Event, Level, Step

#: How many of a job's first events are kept beside the newest.
FIRST_EVENTS = 100
TRIM_EVERY = 100  # events of a job: looking takes longer than writing
TRIMMED = 1000  # events at once: a job may have had more when the limit was set
_EVENT_ID = re.compile(r"ftevent-([0-9a-f]{12})[0-9a-f]{20}")


class Journal:
    """Used inside the caller's transaction."""

    def __init__(self, connection: sqlite3.Connection, max_events: int) -> None:
        """`max_events`: of one job, more than FIRST_EVENTS and TRIM_EVERY."""
        self._connection = connection
        self._max_events = max_events
        self._said: dict[str, int] = {}  # of jobs, events since theirs were trimmed

    def say(self, job_id: str, now: float, message: str, level: Level = "info", data: Any = None) -> None:
        """An event; with `data`, one of type "metrics"."""
        kind = "message" if data is None else "metrics"
        text = None if data is None else msgspec.json.encode(data).decode()
        self._connection.execute(
            "INSERT INTO events (id, job_id, created_at, level, message, type, data) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (_event_id(now), job_id, now, level, message, kind, text),
        )
        said = self._said.get(job_id, TRIM_EVERY) + 1
        if said > TRIM_EVERY:
            self._trim(job_id)
            said = 1
        self._said[job_id] = said

    def record(self, job_id: str, now: float, step: Step, total_steps: int) -> bool:
        """False for a step that is known already: after a crash some are trained, and reported, again."""
        known = self._connection.execute(
            "SELECT 1 FROM steps WHERE job_id = ? AND step = ?", (job_id, step.step)
        ).fetchone()
        self._connection.execute(
            "INSERT OR REPLACE INTO steps (job_id, step, metrics) VALUES (?, ?, ?)",
            (job_id, step.step, msgspec.json.encode(step).decode()),
        )
        if known is None:
            loss = "not finite" if step.train_loss is None else f"{step.train_loss:.4f}"
            text = f"Step {step.step}/{total_steps}: training loss={loss}"
            if step.valid_loss is not None:
                text += f", validation loss={step.valid_loss:.4f}"
            self.say(job_id, now, text, data={**metrics(step), "total_steps": total_steps})
        return known is None

    def _trim(self, job_id: str) -> None:
        """The first events and the newest stay."""
        self._connection.execute(
            """DELETE FROM events WHERE sequence IN (SELECT sequence FROM events WHERE job_id = :job
            AND sequence > (SELECT sequence FROM events WHERE job_id = :job ORDER BY sequence LIMIT 1 OFFSET :first)
            AND sequence < (SELECT sequence FROM events WHERE job_id = :job ORDER BY sequence DESC LIMIT 1 OFFSET :last)
            ORDER BY sequence LIMIT :most)""",
            {
                "job": job_id,
                "first": FIRST_EVENTS - 1,
                "last": self._max_events - FIRST_EVENTS - TRIM_EVERY,
                "most": TRIMMED,
            },
        )

    def last_step(self, job_id: str) -> int:
        (last,) = self._connection.execute("SELECT max(step) FROM steps WHERE job_id = ?", (job_id,)).fetchone()
        return last or 0

    def steps(self, job_id: str) -> list[Step]:
        rows = self._connection.execute("SELECT metrics FROM steps WHERE job_id = ? ORDER BY step", (job_id,))
        return [msgspec.json.decode(text, type=Step) for (text,) in rows]

    def add_checkpoint(self, job_id: str, now: float, step: int) -> None:
        done = self._connection.execute(
            "INSERT OR IGNORE INTO checkpoints (id, job_id, step, created_at) VALUES (?, ?, ?, ?)",
            (f"ftckpt-{secrets.token_hex(16)}", job_id, step, now),
        )
        if done.rowcount:
            self.say(job_id, now, f"Checkpoint created at step {step}")

    def last_checkpoint(self, job_id: str) -> float | None:
        """When the newest one was made."""
        asked = "SELECT max(created_at) FROM checkpoints WHERE job_id = ?"
        last: float | None = self._connection.execute(asked, (job_id,)).fetchone()[0]
        return last

    def events(self, job_id: str, *, after: float | None, before: float | None, limit: int) -> list[Event]:
        """Behind the place `after`, the oldest first; else the newest first, and before `before` when it is given."""
        where, bound = ("sequence > ?", after) if after is not None else ("sequence < ?", before or 2**62)
        direction = "ASC" if after is not None else "DESC"
        rows = self._connection.execute(
            f"""SELECT sequence, id, created_at, level, message, type, data FROM events
            WHERE job_id = ? AND {where} ORDER BY sequence {direction} LIMIT ?""",
            (job_id, bound, limit),
        )
        return [
            Event(sequence, name, at, level, message, kind, None if data is None else msgspec.json.decode(data))
            for sequence, name, at, level, message, kind, data in rows
        ]

    def event_place(self, job_id: str, event_id: str) -> float | None:
        """Its sequence number; of one that was trimmed, a place between those of the events that are left. None: it is
        none of the job's."""
        row = self._connection.execute(
            "SELECT sequence FROM events WHERE job_id = ? AND id = ?", (job_id, event_id)
        ).fetchone()
        return self._place_of_trimmed(job_id, event_id) if row is None else float(row[0])

    def _place_of_trimmed(self, job_id: str, event_id: str) -> float | None:
        """There is one gap: behind the first events. What was in it is known by its time."""
        named = _EVENT_ID.fullmatch(event_id)
        around = self._connection.execute(
            "SELECT sequence, created_at FROM events WHERE job_id = ? ORDER BY sequence LIMIT 2 OFFSET ?",
            (job_id, FIRST_EVENTS - 1),
        ).fetchall()
        if named is None or len(around) < 2:
            return None
        (sequence, begin), (_, end) = around
        return sequence + 0.5 if _milliseconds(begin) <= int(named[1], 16) <= _milliseconds(end) else None

    def checkpoints(self, job_id: str, *, before_step: int | None, limit: int) -> list[Checkpoint]:
        """The newest first."""
        rows = self._connection.execute(
            """SELECT checkpoints.id, created_at, metrics FROM checkpoints
            JOIN steps ON steps.job_id = checkpoints.job_id AND steps.step = checkpoints.step
            WHERE checkpoints.job_id = ? AND checkpoints.step < ? ORDER BY checkpoints.step DESC LIMIT ?""",
            (job_id, 2**62 if before_step is None else before_step, limit),
        )
        return [Checkpoint(name, at, msgspec.json.decode(text, type=Step)) for name, at, text in rows]

    def checkpoint_step(self, job_id: str, checkpoint_id: str) -> int | None:
        row = self._connection.execute(
            "SELECT step FROM checkpoints WHERE job_id = ? AND id = ?", (job_id, checkpoint_id)
        ).fetchone()
        return None if row is None else int(row[0])


def metrics(step: Step) -> dict[str, int | float]:
    """OpenAI's names, without what was not measured. A validation is over the whole file: OpenAI's full one."""
    measured = {
        "step": step.step,
        "train_loss": step.train_loss,
        "train_mean_token_accuracy": step.train_mean_token_accuracy,
        "valid_loss": step.valid_loss,
        "valid_mean_token_accuracy": step.valid_mean_token_accuracy,
        "full_valid_loss": step.valid_loss,
        "full_valid_mean_token_accuracy": step.valid_mean_token_accuracy,
    }
    return {name: value for name, value in measured.items() if value is not None}


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


def _event_id(now: float) -> str:
    """Begins with its time, as in RFC 9562's version 7: that it was a job's is known when it is gone."""
    return f"ftevent-{_milliseconds(now):012x}{secrets.token_hex(10)}"
