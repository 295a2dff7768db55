"""Jobs, stores and leases as the tests of fine-tuning need them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from server.finetune.leases import TRAIN, VALIDATE, Leases
from server.finetune.records import Hyperparameters, Job, JobRequest, Step
from server.finetune.store import JobStore

MODEL = "base"
REQUEST = JobRequest(MODEL, "supervised", Hyperparameters(), "file-1")
PLAN = '{"model": "base"}'
LEASE = 10.0


@contextmanager
def opened(folder: Path) -> Iterator[JobStore]:
    store = JobStore(folder / "jobs.sqlite3")
    try:
        yield store
    finally:
        store.close()


def create(store: JobStore, name: str = "ftjob-1", owner: str = "me", now: float = 100.0, **changes: Any) -> Job:
    key, limit, full = changes.pop("key", None), changes.pop("max_live", 100), changes.pop("max_full", 100)
    models = changes.pop("models", set)
    job = store.create(name, owner, MODEL, replace(REQUEST, **changes), 7, now, key, limit, full, models)
    assert job is not None
    return job


def leases(store: JobStore, holder: str = "server-a", gone: Sequence[str] = ()) -> Leases:
    return Leases(store, holder, LEASE, back_off=1.0, is_gone=gone.__contains__)


def validated(store: JobStore, held: Leases, now: float = 101.0, steps: int = 4) -> None:
    job = held.claim(VALIDATE, MODEL, now)
    assert job is not None
    held.validated(job, now, PLAN, steps, "2 training examples")


def training(store: JobStore, held: Leases, now: float = 102.0) -> Job:
    """The job, created and validated before, held by a trainer."""
    validated(store, held, now)
    job = held.claim(TRAIN, MODEL, now)
    assert job is not None
    return job


def step(number: int, **changes: Any) -> Step:
    return replace(Step(number, 2.0 / number, 0.5, None, None, 1e-4, 10, 0.5), **changes)


def messages(store: JobStore, job_id: str = "ftjob-1") -> list[str]:
    return [event.message for event in store.journal.events(job_id, after=0, before=None, limit=1000)]
