"""What ended jobs and crashes leave on the disk, among the files, in the engine and, after long, in the store: it goes.
Knows no HTTP and no SQL.

A job's folder goes last, and not while somebody works in it: what is cut short is done again.
"""

import asyncio
import logging
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from server.errors import FileMissing, InsufficientStorage, LongwaveError, ModelNotFound
from server.files.store import FileStore
from server.finetune.finishing import UnloadAdapter
from server.finetune.folders import Folders, JobFolder
from server.finetune.records import Job, Status
from server.finetune.results import model_name, result_file_id
from server.finetune.retention import forget_jobs, forget_steps
from server.finetune.stats import FineTuningStats
from server.finetune.store import JobStore
from server.finetune.writer import Writer

logger = logging.getLogger("longwave")


class Tidying:
    def __init__(
        self,
        writer: Writer,
        folders: Folders,
        files: FileStore,
        unload_adapter: UnloadAdapter,
        stats: FineTuningStats,
        kept_days: float,
    ) -> None:
        """`kept_days`: for which jobs that have ended without a model are remembered; 0: for ever."""
        self._writer = writer
        self._folders = folders
        self._files = files
        self._unload_adapter = unload_adapter
        self._stats = stats
        self._kept_seconds = kept_days * 86400

    async def tidy(self) -> None:
        """Also counts the numbers of /metrics. Raises InsufficientStorage."""
        if not await self._folders.are_there():  # nobody ever asked for fine-tuning: leave no trace on the disk
            return
        now = self._writer.clock()
        for folder, job in (await self._writer.store(self._jobs)).items():
            try:
                if folder.is_orphan if job is None else self._has_ended(job):
                    await self._end(folder, job)
            except FileNotFoundError:
                pass  # another server was faster
            except (OSError, LongwaveError) as error:
                logger.warning("what %s has left cannot be removed yet: %s", folder.path.name, error)
        for path in await self._writer.store(self._strays):  # many gigabytes perhaps, and leases are renewed meanwhile
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
        await self._writer.keep_room()
        if self._kept_seconds:
            models = await asyncio.to_thread(self._folders.models)
            with suppress(InsufficientStorage):  # it is in the log, and rows can wait
                await self._forget(lambda store: forget_jobs(store, now, self._kept_seconds, models))
        self._stats.jobs = await self._writer.store(lambda store: store.counts())

    async def _forget(self, some: Callable[[JobStore], bool]) -> None:
        """Until there is nothing more."""
        while await self._writer.store(some):
            pass

    def _jobs(self, store: JobStore) -> dict[JobFolder, Job | None]:
        return {folder: store.known(folder.path.name) for folder in self._folders.jobs()}

    def _has_ended(self, job: Job) -> bool:
        """For good: it cannot be resumed."""
        return job.status.is_final and not job.can_be_resumed(self._writer.clock())

    def _strays(self, store: JobStore) -> list[Path]:
        adapters = self._folders.stray_adapters(store.has_ended, store.holds_adapter_of)
        return adapters + self._folders.stray_models(store.has_ended, store.has_succeeded)

    async def _end(self, folder: JobFolder, job: Job | None) -> None:
        """Unless somebody works in the folder, who tidies afterwards."""
        with folder.alone() as alone:
            if alone:
                if job is not None and job.status is not Status.SUCCEEDED:
                    await self._take_back(job)
                if job is not None:
                    await self._forget(partial(forget_steps, job_id=job.id))
                await asyncio.to_thread(shutil.rmtree, folder.path, ignore_errors=True)

    async def _take_back(self, job: Job) -> None:
        """What finishing had made of it when it was cancelled, or when a crash was one too many."""
        with suppress(ModelNotFound):
            await self._unload_adapter(model_name(job.request.model, job.request.suffix, job.id))
        with suppress(FileMissing):
            await asyncio.to_thread(self._files.delete, result_file_id(job.id), job.owner)
        await asyncio.to_thread(self._folders.remove_adapter, job.id)
        await asyncio.to_thread(self._folders.remove_model, job.id)
