"""Takes up jobs, one of each stage at a time, for as long as the server lives. Knows no HTTP or SQL."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from server.errors import EngineUnavailable, InsufficientStorage
from server.finetune.attempt import Attempt
from server.finetune.config import TrainerConfig
from server.finetune.finishing import Finishing
from server.finetune.folders import Folders
from server.finetune.leases import TRAIN, VALIDATE, Killed, Stage
from server.finetune.records import Job, Status
from server.finetune.settling import Settling
from server.finetune.stats import FineTuningStats
from server.finetune.tidying import Tidying
from server.finetune.writer import Writer

logger = logging.getLogger("longwave")

POLL_SECONDS = 1.0  # another server may leave a job, and leases and waits end by themselves
TIDY_SECONDS = 600.0  # what a crash has left may be too young to go when it is first seen
FAILURE_SECONDS = 30.0  # after the store could not be used
SERVE_SECONDS = 5.0  # between two looks at which finished models there are, and whether the engine can take them


class Supervisor:
    """A lane for each stage: files are validated while another job trains. What jobs leave on the disk is tidied beside
    them, since deleting may take long and nobody waits for it."""

    def __init__(
        self,
        config: TrainerConfig,
        writer: Writer,
        folders: Folders,
        finishing: Finishing,
        tidying: Tidying,
        stats: FineTuningStats,
        max_model_len: Callable[[], int | None],
    ) -> None:
        self.attempts: dict[str, Attempt] = {}  # what runs now, by stage
        self._config = config
        self._writer = writer
        self._folders = folders
        self._finishing = finishing
        self._stats = stats
        self._tidying = tidying
        self._tidying_alone = asyncio.Lock()
        self._tidying_wanted = asyncio.Event()
        self._settling = Settling(config, writer, folders, finishing, stats, max_model_len)
        self._draining = asyncio.Event()
        self._lanes: list[asyncio.Task[None]] = []
        self._tidier: asyncio.Task[None] | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when every finished model of the base model is served, or will be as soon as it can be."""
        seconds = await self._serve()
        self._serving = asyncio.create_task(self._serve_later(seconds), name="serve")
        self._lanes = [asyncio.create_task(self._lane(stage), name=stage.name) for stage in (VALIDATE, TRAIN)]
        self.tidy_soon()
        self._tidier = asyncio.create_task(self._tidy_when_wanted(), name="tidy")

    async def drain(self) -> None:
        """Takes up nothing more, and returns when what runs has stopped at a checkpoint."""
        self._draining.set()
        self._writer.announce()
        if self._lanes:
            await asyncio.wait(self._lanes)
        if self._tidier is not None:  # what the last jobs have left
            self.tidy_soon()
            await asyncio.wait([self._tidier])

    async def close(self) -> None:
        """Ends what runs, at once; at most the steps since the last checkpoint are lost."""
        self._draining.set()
        tasks = [*self._lanes, *(task for task in (self._tidier, self._serving) if task is not None)]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def tidy(self) -> None:
        """What jobs that have ended leave is gone when this returns; the numbers of /metrics are counted. Raises
        InsufficientStorage."""
        async with self._tidying_alone:  # or the folders that another call removes now would only be passed over
            await self._tidying.tidy()

    def tidy_soon(self) -> None:
        """The same, in a moment; what goes wrong is in the log, and done again later."""
        self._tidying_wanted.set()

    async def _serve(self) -> float:
        """In how many seconds to look again."""
        try:
            if await self._folders.are_there():
                await self._finishing.serve(self._config.source)
        except (EngineUnavailable, InsufficientStorage) as error:
            if self._serving is None:
                logger.warning("finished models are not served yet, which is tried again: %s", error.message)
        except Exception:
            logger.exception("finished models could not be served")
            return FAILURE_SECONDS
        return SERVE_SECONDS

    async def _serve_later(self, seconds: float) -> None:
        """What the engine could not take, and what other servers make and delete."""
        while not self._draining.is_set():
            await asyncio.sleep(seconds)
            seconds = await self._serve()

    async def _tidy_when_wanted(self) -> None:
        while self._tidying_wanted.is_set() or not self._draining.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TIDY_SECONDS):
                    await self._tidying_wanted.wait()
            self._tidying_wanted.clear()
            try:
                await self.tidy()
            except InsufficientStorage:
                pass  # it is in the log
            except Exception:
                logger.exception("what fine-tuning jobs have left could not be tidied")

    async def _lane(self, stage: Stage) -> None:
        changed = self._writer.listen()
        try:
            while not self._draining.is_set():
                changed.clear()
                seconds = POLL_SECONDS
                try:
                    if await self._turn(stage):
                        continue
                except InsufficientStorage:
                    seconds = FAILURE_SECONDS
                except Exception:
                    logger.exception("a fine-tuning job could not be worked on")
                    seconds = FAILURE_SECONDS
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await changed.wait()
        finally:
            self._writer.forget(changed)

    async def _turn(self, stage: Stage) -> bool:
        """Whether there was something to do."""
        job = await self._claim(stage)
        if job is None:
            return False
        if isinstance(job, Killed):
            self._stats.crashes += 1
            if job.failed:
                self._stats.end(Status.FAILED)
            self._writer.announce()
            self.tidy_soon()
            return True
        attempt = self.attempts[stage.name] = Attempt(
            job, stage, self._config, self._writer, self._folders, self._settling, self._stats, self._draining
        )
        try:
            await attempt.run()
        finally:
            del self.attempts[stage.name]
        self.tidy_soon()
        return True

    async def _claim(self, stage: Stage) -> Job | Killed | None:
        """Cancelled, it gives back what it has got."""
        if not await self._folders.are_there():  # nobody ever asked for fine-tuning: leave no trace on the disk
            return None
        now = self._writer.clock()
        claiming = asyncio.ensure_future(
            self._writer.leases(lambda leases: leases.claim(stage, self._config.source, now))
        )
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):  # what cannot be written lapses
                job = await claiming
                if isinstance(job, Job):
                    await self._writer.leases(lambda leases: leases.stopped(job))
            raise
