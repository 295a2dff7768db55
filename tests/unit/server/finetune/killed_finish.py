"""A server that brings one job to its end, its own or the one that another such server has left, or takes back what a
cancelled one has left, and kills itself (SIGKILL) at the named instant: python killed_finish.py FOLDER INSTANT
TRAINING_TYPE. Prints the job's id."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from working import Work, at_work

from server.files.catalog import Catalog
from server.files.store import FileStore
from server.finetune import Status
from server.finetune.folders import Folders
from server.finetune.leases import Leases


def die(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def then_die(act: Callable[..., Any]) -> Callable[..., Any]:
    def acted(*given: Any, **named: Any) -> None:
        act(*given, **named)
        die()

    return acted


stepped = Leases.stepped


def step_or_die(leases: Leases, job: Any, now: float, step: Any, total: int, *, checkpoint: bool) -> Any:
    known = stepped(leases, job, now, step, total, checkpoint=checkpoint)
    return die() if step.step == total else known


#: Between any two of the last checkpoint's report, the result and its count, the result file's bytes and listing, the
#: adapter's rename, the engine and the job's last row.
FINISHING = {
    "the last checkpoint is reported": (Leases, "stepped", step_or_die),
    "the result is whole": (Leases, "trained", die),
    "the result is counted": (Leases, "trained", then_die(Leases.trained)),
    "the result file's bytes are there": (Catalog, "add", die),
    "the result file is listed": (Catalog, "add", then_die(Catalog.add)),
    "the adapter is in its place": (Folders, "keep", then_die(Folders.keep)),
    "the model is served": (Leases, "succeeded", die),
    "the job has succeeded": (Leases, "succeeded", then_die(Leases.succeeded)),
}
REMOVING = {"the model is no longer listed": (Folders, "remove_adapter", die)}
#: Of a cancelled job, whose server was killed when its model was served.
TAKING_BACK = {
    "the result file is no longer listed": (Catalog, "remove", then_die(Catalog.remove)),
    "the result file is gone": (FileStore, "delete", then_die(FileStore.delete)),
    "the adapter is gone": (Folders, "remove_adapter", then_die(Folders.remove_adapter)),
}


async def finish(work: Work, instant: str, training_type: Any) -> None:
    if instant in FINISHING and FINISHING[instant][0] is Leases:  # before a trainer can be so far
        setattr(*FINISHING[instant])
    left = await work.jobs.page("me", None, 1, {})
    job = left[0] if left else await work.create(steps=2, training_type=training_type)
    print(job.id, flush=True)  # noqa: T201 - the test reads it
    if instant in FINISHING:  # its own file is listed by now
        setattr(*FINISHING[instant])
    done = await work.until(job, Status.SUCCEEDED)
    adapter = await work.jobs.adapter(str(done.fine_tuned_model))
    assert adapter is not None
    setattr(*REMOVING[instant])
    await work.jobs.remove_adapter(adapter)


async def take_back(work: Work, instant: str, _: str) -> None:
    (job,) = await work.jobs.page("me", None, 1, {})
    setattr(*TAKING_BACK[instant])
    await work.jobs.cancel(job.id, "me")
    await work.jobs.supervisor.tidy()


async def main(folder: Path, instant: str, training_type: str) -> None:
    taking_back = instant in TAKING_BACK
    async with at_work(folder, start=not taking_back) as work:
        await (take_back if taking_back else finish)(work, instant, training_type)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:]))
