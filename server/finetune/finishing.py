"""A trainer's result -> an adapter that is served, or a whole model that is kept; a file of metrics, a job that has
succeeded. Every part of it may be repeated after a crash. Knows no HTTP and no processes."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from server.errors import AdapterExists, EngineUnavailable, LongwaveError, QuotaExceeded
from server.files.store import FileStore
from server.finetune.folders import Folders, FolderState, folder_state
from server.finetune.messages import Finished
from server.finetune.records import Job
from server.finetune.results import PURPOSE, metrics_csv, model_name, result_file_id
from server.finetune.store import JobStore
from server.finetune.writer import Writer

logger = logging.getLogger("longwave")

LoadAdapter = Callable[[str, Path, str], Awaitable[None]]  # name, folder, owner; raises LongwaveError
UnloadAdapter = Callable[[str], Awaitable[None]]  # name; raises LongwaveError
IsServed = Callable[[str], bool]  # name


@dataclass(frozen=True, slots=True)
class _Refusal:
    owner: str
    error: LongwaveError
    state: FolderState  # before it was read


class Finishing:
    def __init__(
        self,
        writer: Writer,
        folders: Folders,
        files: FileStore,
        load_adapter: LoadAdapter,
        unload_adapter: UnloadAdapter,
        is_served: IsServed,
    ) -> None:
        self._writer = writer
        self._folders = folders
        self._files = files
        self._load_adapter = load_adapter
        self._unload_adapter = unload_adapter
        self._is_served = is_served
        self._served: set[str] = set()
        self._refused: dict[str, _Refusal] = {}

    async def finish(self, job: Job, finished: Finished) -> None:
        """The caller works in the job's folder alone. Raises LeaseLostError, EngineUnavailable, InsufficientStorage,
        OSError."""
        name = model_name(job.request.model, job.request.suffix, job.id)
        steps = await self._writer.store(lambda store: store.journal.steps(job.id))
        content = await asyncio.to_thread(metrics_csv, steps)
        file_id = result_file_id(job.id)
        await asyncio.to_thread(
            self._files.put,
            file_id,
            job.owner,
            purpose=PURPOSE,
            filename=f"{job.id}.csv",
            content=content,
            lines=len(steps),
        )
        # Last of what is written: while a disk is full, the result stays where the next trainer finds it.
        place = await asyncio.to_thread(self._folders.keep, job.id, Path(finished.result), whole=job.request.is_full)
        notes = [] if job.request.is_full else await self.load(name, place, job.owner)
        now = self._writer.clock()
        try:
            await self._writer.leases(
                lambda leases: leases.succeeded(
                    job, now, model=name, trained_tokens=finished.trained_tokens, result_file=file_id, notes=notes
                )
            )
        except Exception:  # what is not written down is not served; what else was made waits for the next attempt
            await self.unload(name)
            raise
        if not job.request.is_full and not notes:
            self._served.add(name)
        logger.info("%s succeeded: %s", job.id, name)

    async def serve(self, source: str) -> None:
        """Every finished model of that base model and no other, though other servers of the data directory make models
        and delete them. Raises EngineUnavailable, InsufficientStorage."""
        # An engine that was started anew may not have taken all of them.
        self._served = {name for name in self._served if self._is_served(name)}
        before = set(self._served)  # a model that is finished meanwhile may not be among those that are asked for
        adapters = await self._writer.store(lambda store: store.adapters(source))
        names = {adapter.name for adapter in adapters}
        self._refused = {name: refusal for name, refusal in self._refused.items() if name in names}
        for name in before - names:
            await self.unload(name)
        for adapter in adapters:
            folder = self._folders.made(adapter.job_id, whole=False)
            if adapter.name in self._served or not await self._may_be_taken(adapter.name, folder):
                continue
            if not await self.load(adapter.name, folder, adapter.owner):
                self._served.add(adapter.name)
            if await self._writer.store(partial(JobStore.adapter, name=adapter.name)) is None:  # deleted meanwhile
                await self.unload(adapter.name)

    async def _may_be_taken(self, name: str, folder: Path) -> bool:
        """Whether the engine has not refused what is there: it has room again when something is unloaded."""
        refusal = self._refused.get(name)
        if refusal is None or isinstance(refusal.error, QuotaExceeded):
            return True
        return await asyncio.to_thread(folder_state, folder) != refusal.state

    def why_not_served(self, name: str, owner: str) -> str | None:
        """Of a finished model of that owner's which the engine refused."""
        refusal = self._refused.get(name)
        return None if refusal is None or refusal.owner != owner else refusal.error.message

    async def unload(self, name: str) -> None:
        """Unless it is not served anyway."""
        with contextlib.suppress(LongwaveError):
            await self._unload_adapter(name)
        self._served.discard(name)

    async def load(self, name: str, folder: Path, owner: str) -> list[str]:
        """What the owner should know when the model cannot be served. Raises EngineUnavailable: not now."""
        state = await asyncio.to_thread(folder_state, folder)
        try:
            await self._load_adapter(name, folder, owner)
        except AdapterExists:
            pass  # by us, before something else went wrong
        except EngineUnavailable:
            raise
        except LongwaveError as error:
            known = self._refused.get(name)
            if known is None or known.error.message != error.message:  # it may be tried every few seconds
                logger.warning("%s, in %s, is not served: %s", name, folder, error.message)
            self._refused[name] = _Refusal(owner, error.with_traceback(None), state)
            return [f"The model is finished and kept, but not served now: {error.message}"]
        self._refused.pop(name, None)
        return []
