"""Fine-tuning as the API sees it: make, find, steer jobs; follow their events. Checks what a request means; must not
know HTTP, SQL or training."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

from server.errors import (
    InsufficientStorage,
    InvalidJobStatus,
    JobMissing,
    SequenceConflict,
)
from server.files.store import FileStore
from server.finetune.acceptance import check, too_many_jobs, too_many_models
from server.finetune.config import TrainerConfig
from server.finetune.feed import follow
from server.finetune.finishing import Finishing, IsServed, LoadAdapter, UnloadAdapter
from server.finetune.folders import Folders
from server.finetune.places import TooManyModelsError
from server.finetune.records import JOB_ID, Adapter, Checkpoint, Event, Job, JobRequest
from server.finetune.stats import FineTuningStats
from server.finetune.store import JobStore, WrongStatusError
from server.finetune.supervisor import Supervisor
from server.finetune.tidying import Tidying
from server.finetune.training_files import make_folder
from server.finetune.writer import Writer

logger = logging.getLogger("longwave")

T = TypeVar("T")

MAX_SEED = 2**31 - 1


class FineTuning:
    """Every method raises InsufficientStorage when the data directory cannot be used. `owner` is a name for the key of
    whoever asks, and other owners' jobs do not exist for it."""

    def __init__(
        self,
        root: Path,
        files: FileStore,
        config: TrainerConfig,
        load_adapter: LoadAdapter,
        unload_adapter: UnloadAdapter,
        is_served: IsServed,
        *,
        max_live_jobs: int,
        max_model_len: Callable[[], int | None],
    ) -> None:
        """`max_model_len`: the engine's, once it is ready."""
        self.stats = FineTuningStats()
        self._files = files
        self._config = config
        self._max_live_jobs = max_live_jobs
        self._folders = Folders(root)
        holder = f"server-{secrets.token_hex(8)}"
        self._writer = Writer(root, holder, config.lease_seconds, config.back_off, config.max_events, stats=self.stats)
        self._finishing = Finishing(self._writer, self._folders, files, load_adapter, unload_adapter, is_served)
        tidying = Tidying(self._writer, self._folders, files, unload_adapter, self.stats, config.kept_days)
        self.supervisor = Supervisor(
            config, self._writer, self._folders, self._finishing, tidying, self.stats, max_model_len
        )

    async def start(self) -> None:
        """Serves every finished model of the base model again, sweeps what a crash left, and takes up what waits. Never
        raises: a server without jobs still answers."""
        await self.supervisor.start()

    async def drain(self) -> None:
        """What runs stops at a checkpoint and goes on with the next start."""
        await self.supervisor.drain()

    async def close(self) -> None:
        await self.supervisor.close()
        await self._writer.close()

    async def create(self, owner: str, request: JobRequest, key: str | None = None) -> Job:
        """`key`: of idempotency. Raises InvalidRequest, UnsupportedParameter, InvalidFile, QuotaExceeded,
        SequenceConflict."""
        known = None if key is None else await self._store(lambda store: store.sent_before(owner, key))
        if known is not None:  # whatever has become of its files since
            return _same(known, request)
        job_id = f"{JOB_ID}{secrets.token_hex(16)}"
        check(request, job_id, self._config)
        await asyncio.to_thread(make_folder, self._folders, self._files, self._config.template, job_id, owner, request)
        seed = secrets.randbelow(MAX_SEED) if request.seed is None else request.seed
        try:
            job = await self._store(
                lambda store: store.create(
                    job_id,
                    owner,
                    self._config.source,
                    request,
                    seed,
                    self._writer.clock(),
                    key,
                    self._max_live_jobs,
                    self._config.max_full_models,
                    self._folders.models,
                )
            )
        except TooManyModelsError:
            self._folders.remove(job_id)
            raise too_many_models(self._config) from None
        except Exception:  # not when cancelled: the job may yet be written, and a folder of none is swept
            self._folders.remove(job_id)
            raise
        if job is None or job.id != job_id:
            await asyncio.to_thread(self._folders.remove, job_id)
        if job is None:
            raise too_many_jobs(self._max_live_jobs)
        self._changed()
        return _same(job, request)

    async def get(self, job_id: str, owner: str) -> Job:
        """Raises JobMissing."""
        job = await self._store(lambda store: store.find(job_id, owner))
        if job is None:
            raise JobMissing(f"No such fine-tuning job: {job_id[:64]}", param="fine_tuning_job_id")
        return job

    async def page(self, owner: str, after: str | None, limit: int, metadata: dict[str, str]) -> list[Job]:
        """The newest first. Raises JobMissing for an `after` that is no job of the owner's."""
        if after is not None and await self._store(lambda store: store.find(after, owner)) is None:
            raise JobMissing(f"No such fine-tuning job: {after[:64]}", param="after")
        return await self._store(lambda store: store.page(owner, after, limit, metadata))

    async def cancel(self, job_id: str, owner: str) -> Job:
        return await self._steer(job_id, owner, "cancelled", JobStore.cancel, frees=True)

    async def pause(self, job_id: str, owner: str) -> Job:
        return await self._steer(job_id, owner, "paused", JobStore.pause)

    async def resume(self, job_id: str, owner: str) -> Job:
        """Also one that has failed, while its checkpoints are kept. Raises QuotaExceeded when there is no place."""
        job = await self.get(job_id, owner)
        if not job.can_be_resumed(self._writer.clock()):
            return await self._steer(job_id, owner, "resumed", JobStore.resume)
        most, most_full = self._max_live_jobs, self._config.max_full_models
        try:
            resumed = await self._store(
                lambda store: store.resume_failed(job_id, self._writer.clock(), most, most_full, self._folders.models)
            )
        except TooManyModelsError:
            raise too_many_models(self._config) from None
        except WrongStatusError as error:
            raise _wrong_status(error.job, "resumed") from None
        if resumed is None:
            raise too_many_jobs(self._max_live_jobs)
        self._changed()
        return resumed

    async def events(self, job_id: str, owner: str, after: str | None, limit: int) -> list[Event]:
        """The newest first, older than the event `after`."""
        job = await self.get(job_id, owner)
        before = None if after is None else await self._event_place(job, after)
        return await self._store(lambda store: store.journal.events(job.id, after=None, before=before, limit=limit))

    async def follow(self, job: Job, after: str | None) -> AsyncIterator[Event | None]:
        """The job's events behind `after`, the oldest first, as they come, until it has ended. None now and then: no
        news. Raises JobMissing for an `after` that is no event of the job."""
        seen = 0 if after is None else await self._event_place(job, after)
        return follow(self._writer, job.id, seen)

    async def checkpoints(self, job_id: str, owner: str, after: str | None, limit: int) -> tuple[Job, list[Checkpoint]]:
        """The newest first, older than the checkpoint `after`."""
        job = await self.get(job_id, owner)
        before = None
        if after is not None:
            before = await self._store(lambda store: store.journal.checkpoint_step(job.id, after))
            if before is None:
                raise JobMissing(f"No such checkpoint of this job: {after[:64]}", param="after")
        return job, await self._store(lambda store: store.journal.checkpoints(job.id, before_step=before, limit=limit))

    async def adapter(self, name: str) -> Adapter | None:
        """A finished model by its name, of any owner."""
        if not await self._folders.are_there():
            return None
        return await self._store(lambda store: store.adapter(name))

    def why_not_served(self, name: str, owner: str) -> str | None:
        """Of a finished adapter of that owner's which the engine refused."""
        return self._finishing.why_not_served(name, owner)

    async def remove_adapter(self, adapter: Adapter) -> None:
        """For good. Raises InsufficientStorage when the disk refuses: then it is served further."""
        await self._writer.freeing(lambda store: store.remove_adapter(adapter.name))
        await self._finishing.unload(adapter.name)
        await asyncio.to_thread(self._folders.remove_adapter, adapter.job_id)

    async def remove_model(self, name: str, owner: str) -> bool:
        """A whole model, for good. Whether the owner had one of that name. Raises InsufficientStorage when the disk
        refuses."""
        known = await self._folders.are_there()  # else nobody ever asked for fine-tuning: leave no trace on the disk
        job = await self._store(lambda store: store.tuned(name, owner)) if known else None
        if job is None or not job.request.is_full:
            return False
        try:
            return await asyncio.to_thread(self._folders.remove_model, job.id)
        except OSError as error:
            logger.error("the model of %s cannot be deleted: %s", job.id, error)
            raise InsufficientStorage(
                "The model cannot be deleted: the server's data directory cannot be used."
            ) from error

    async def _steer(
        self, job_id: str, owner: str, verb: str, act: Callable[[JobStore, str, float], Job], *, frees: bool = False
    ) -> Job:
        job = await self.get(job_id, owner)
        write = self._writer.freeing if frees else self._writer.store
        try:
            steered = await write(lambda store: act(store, job.id, self._writer.clock()))
        except WrongStatusError as error:
            raise _wrong_status(error.job, verb) from None
        self._changed()
        return steered

    async def _event_place(self, job: Job, event_id: str) -> float:
        place = await self._store(lambda store: store.journal.event_place(job.id, event_id))
        if place is None:
            raise JobMissing(f"No such event of this job: {event_id[:64]}", param="after")
        return place

    def _changed(self) -> None:
        self._writer.announce()
        self.supervisor.tidy_soon()

    async def _store(self, work: Callable[[JobStore], T]) -> T:
        return await self._writer.store(work)


def _wrong_status(job: Job, verb: str) -> InvalidJobStatus:
    return InvalidJobStatus(f"Job {job.id} has status '{job.status}' and cannot be {verb}.")


def _same(job: Job, request: JobRequest) -> Job:
    """The job that an idempotency key has made. Raises SequenceConflict unless it is the one that is asked for."""
    if job.request != request:
        raise SequenceConflict("This Idempotency-Key was sent before, with another request.")
    return job
