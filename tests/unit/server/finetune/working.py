"""Fine-tuning at work: the real store, leases, processes and files; the trainer inside the process follows a script."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from server.errors import LongwaveError
from server.files.store import FileLimits, FileStore
from server.finetune import FineTuning, Hyperparameters, Job, JobRequest, Status, TrainerConfig

MODEL = "base"
LIMIT = 60.0  # seconds for anything to happen: generous, since the machine may be busy
POLL_SECONDS = 0.05  # of a server for jobs whose wait is over: most tests wait for nothing else
PAIR = b'{"prompt": "a", "completion": "b"}\n'
Run = Callable[..., None]
# On "auto" a trainer imports torch, only to see that there is no GPU.
CONFIG: dict[str, Any] = {
    "worker": "scripted_worker", "device": "cpu", "lease_seconds": 5.0, "beat_seconds": 0.2, "back_off": 0.05,
    "checkpoint_every": 2, "max_full_parameters": 100,
}  # fmt: skip


@dataclass
class Work:
    jobs: FineTuning
    files: FileStore
    folder: Path
    loaded: list[tuple[str, Path, str]] = field(default_factory=list)
    refusal: LongwaveError | None = None

    async def load(self, name: str, folder: Path, owner: str) -> None:
        if self.refusal is not None:
            raise self.refusal
        assert folder.is_dir()
        self.loaded.append((name, folder, owner))

    async def unload(self, name: str) -> None:
        self.loaded = [one for one in self.loaded if one[0] != name]

    def serves(self, name: str) -> bool:
        return any(one[0] == name for one in self.loaded)

    async def create(self, content: bytes = PAIR * 4, owner: str = "me", steps: int = 6, **changes: Any) -> Job:
        file_id = put(self.files, content, owner)
        kind = changes.pop("training_type", "lora")
        asked = Hyperparameters(n_epochs=steps, batch_size=len(content.splitlines()), training_type=kind)
        request = JobRequest(MODEL, "supervised", asked, file_id, **{"seed": 1, **changes})
        return await self.jobs.create(owner, request)

    async def until(self, job: Job, *statuses: Status) -> Job:
        return await self.wait(job, lambda now: now.status in statuses)

    async def succeeded(self, job: Job) -> Job:
        done = await self.until(job, Status.SUCCEEDED, Status.FAILED)
        assert done.status is Status.SUCCEEDED, done.failure
        return done

    async def failed(self, job: Job) -> Job:
        failed = await self.until(job, Status.SUCCEEDED, Status.FAILED)
        assert failed.status is Status.FAILED
        assert failed.failure is not None
        return failed

    async def wait(self, job: Job, condition: Callable[[Job], Any]) -> Job:
        deadline = time.monotonic() + LIMIT
        while not condition(now := await self.jobs.get(job.id, job.owner)):
            assert time.monotonic() < deadline, (now.status, now.failure, await self.said(job))
            await asyncio.sleep(0.02)
        return now

    async def said(self, job: Job) -> list[str]:
        return [event.message for event in (await self.jobs.events(job.id, job.owner, None, 1000))[::-1]]

    async def told(self, job: Job, text: str) -> None:
        deadline = time.monotonic() + LIMIT
        while not any(text in said for said in await self.said(job)):
            assert time.monotonic() < deadline, await self.said(job)
            await asyncio.sleep(0.02)

    async def trainer(self, job: Job, step: int) -> int:
        """The process id of who has told this step of `create`'s job, and holds if it is to hold at the next."""
        await self.told(job, f"Step {step}/6")
        if json.loads((self.folder / "script.json").read_text()).get("hold_at") == step + 1:
            await self.wait(job, lambda _: (self.folder / "holds").exists())
        assert self.trainer_pid is not None
        return self.trainer_pid

    @property
    def trainer_pid(self) -> int | None:
        attempt = self.jobs.supervisor.attempts.get("train")
        return None if attempt is None or attempt.process is None else attempt.process.pid

    @property
    def trainer_is_told_to_stop(self) -> bool:
        attempt = self.jobs.supervisor.attempts.get("train")
        return attempt is not None and attempt._stopping

    def job_folder(self, job: Job) -> Path:
        return self.folder / "finetune" / "jobs" / job.id

    def weights(self, job: Job) -> str:
        return (self.folder / "finetune" / "adapters" / job.id / "weights").read_text()

    def go_on(self) -> None:
        """To a trainer that holds."""
        (self.folder / "go").touch()

    def trained(self) -> list[str]:
        """Every step that any trainer of this test has computed."""
        return (self.folder / "trained").read_text().splitlines()


def put(files: FileStore, content: bytes, owner: str) -> str:
    from training_files import upload

    return upload(files, content, owner).id


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def script(folder: Path, monkeypatch: pytest.MonkeyPatch, **what: Any) -> Path:
    """What trainers of this test do from now on; the returned file lets those that hold go on."""
    monkeypatch.setenv("FINE_TUNING_SCRIPT", str(write_script(folder, what)))
    return folder / "go"


def write_script(folder: Path, what: dict[str, Any]) -> Path:
    """At once: a trainer that starts meanwhile reads the one or the other, and never half of one."""
    new = folder / "script.new"
    new.write_text(json.dumps(what))
    return new.replace(folder / "script.json")


@asynccontextmanager
async def at_work(
    folder: Path, *, source: str = MODEL, max_live_jobs: int = 100, start: bool = True, **changes: Any
) -> AsyncIterator[Work]:
    files = FileStore(folder / "files", FileLimits(2**20, 2**22, 100))
    config = TrainerConfig(source, **{**CONFIG, **changes})
    work = Work(None, files, folder)  # type: ignore[arg-type] - it needs the work itself
    work.jobs = FineTuning(
        folder / "finetune", files, config, work.load, work.unload, work.serves,
        max_live_jobs=max_live_jobs, max_model_len=lambda: None,
    )  # fmt: skip
    with patch("server.finetune.supervisor.POLL_SECONDS", POLL_SECONDS):
        if start:
            await work.jobs.start()
        try:
            yield work
        finally:
            await work.jobs.close()
            files.close()


def uninterrupted(folder: Path, steps: int = 6) -> str:
    """The weights of a job of so many steps to which nothing happens."""

    async def main() -> str:
        async with at_work(folder) as work:
            return work.weights(await work.succeeded(await work.create(steps=steps)))

    with pytest.MonkeyPatch.context() as monkeypatch:
        script(folder, monkeypatch)
        return asyncio.run(main())
