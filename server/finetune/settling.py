"""A trainer's last word -> what becomes of its job, written down. Knows no processes, no HTTP and no SQL."""

import logging
from collections.abc import Callable

from models.training import PlanError
from server.errors import EngineUnavailable
from server.finetune.config import TrainerConfig
from server.finetune.finishing import Finishing
from server.finetune.folders import Folders
from server.finetune.hyperparameters import TooManyStepsError, make_plan, total_steps
from server.finetune.messages import Busy, Crashed, Finished, LastWord, NoRoom, Refused, Stopped, Validated
from server.finetune.records import Failure, Job, Status
from server.finetune.stats import FineTuningStats
from server.finetune.writer import Writer

logger = logging.getLogger("longwave")


class Settling:
    """Every method raises LeaseLostError and InsufficientStorage."""

    def __init__(
        self,
        config: TrainerConfig,
        writer: Writer,
        folders: Folders,
        finishing: Finishing,
        stats: FineTuningStats,
        max_model_len: Callable[[], int | None],
    ) -> None:
        self._config = config
        self._writer = writer
        self._folders = folders
        self._finishing = finishing
        self._stats = stats
        self._max_model_len = max_model_len

    def told_before(self, job: Job) -> Finished | None:
        """The last word of an earlier trainer whose result is there, in its place already or not yet: the server was
        killed before it had written that the job has succeeded. Another trainer would only make the result again.
        Raises OSError."""
        if job.trained_tokens is None:
            return None
        made = (self._folders.made(job.id, whole=job.request.is_full), self._folders.job(job.id).result)
        place = next((place for place in made if place.exists()), None)
        return None if place is None else Finished(job.trained_tokens, str(place))

    async def settle(self, job: Job, word: LastWord) -> None:
        """Raises OSError, too."""
        leases = self._writer.leases
        match word:
            case Validated():
                await self._validated(job, word)
            case Finished():
                await self._finished(job, word)
            case Stopped():
                await leases(lambda held: held.stopped(job))
            case Busy():
                await self._wait(job)
            case Refused(code=code, message=text, param=param):
                await self._fail(job, Failure(code, text, param))
            case NoRoom(reason=reason, on_disk=True):
                await self.no_room(job, reason)
            case NoRoom(reason=reason, answering=answering):
                await self._out_of_memory(job, reason, answering)
            case Crashed(reason=reason):
                await self.crashed(job, reason)
        self._writer.announce()

    async def crashed(self, job: Job, reason: str) -> None:
        """It is tried again later; once too often, and it has failed."""
        logger.warning("%s: %s", job.id, reason)
        now = self._writer.clock()
        failed = await self._writer.leases(lambda leases: leases.crashed(job, now, reason))
        self._stats.crashes += 1
        if failed:
            self._stats.end(Status.FAILED)

    async def _out_of_memory(self, job: Job, reason: str, answering: bool) -> None:
        """A disk is full of other things, too; what does not fit into memory will not fit tomorrow either."""
        logger.warning("%s: %s", job.id, reason)
        now = self._writer.clock()
        if await self._writer.leases(lambda leases: leases.out_of_memory(job, now, reason, answering=answering)):
            self._stats.end(Status.FAILED)

    async def no_room(self, job: Job, reason: str) -> None:
        """It waits, and loses nothing, until somebody has made room."""
        now = self._writer.clock()
        await self._writer.leases(lambda leases: leases.no_room(job, now, reason))
        self._stats.waits += 1
        logger.warning("%s waits: %s", job.id, reason)  # once: where this cannot be written, it is tried every second

    async def _validated(self, job: Job, files: Validated) -> None:
        config = self._config
        try:
            plan = make_plan(
                job.request,
                job.source,
                job.seed,
                files,
                checkpoint_every=config.checkpoint_every,
                micro_batch_tokens=config.micro_batch_tokens,
                default_rank=config.default_rank,
                max_model_len=self._max_model_len(),
                deterministic=config.deterministic,
            )
        except (PlanError, TooManyStepsError) as error:
            return await self._fail(job, Failure("invalid_hyperparameters", str(error), "hyperparameters"))
        steps = total_steps(files.examples, plan.n_epochs, plan.batch_size)
        summary = f"{files.examples} training examples, {files.tokens} tokens, the longest {files.longest}"
        if files.validation_examples:
            summary += f"; {files.validation_examples} validation examples"
        now, text = self._writer.clock(), plan.to_json()
        await self._writer.leases(lambda leases: leases.validated(job, now, text, steps, summary))
        return None

    async def _finished(self, job: Job, word: Finished) -> None:
        """What is tidied of jobs that have ended meanwhile waits until this is over."""
        now, tokens = self._writer.clock(), word.trained_tokens
        await self._writer.leases(lambda leases: leases.trained(job, now, tokens))  # else its folder may be gone
        with self._folders.job(job.id).alone() as alone:
            if not alone:
                return await self._wait(job)
            try:
                await self._finishing.finish(job, word)
            except EngineUnavailable as error:
                return await self._publish_later(job, error)
        self._stats.end(Status.SUCCEEDED)
        return None

    async def _publish_later(self, job: Job, error: EngineUnavailable) -> None:
        logger.warning("%s waits: its model cannot be served yet: %s", job.id, error.message)
        now, reason = self._writer.clock(), f"The model cannot be served yet: {error.message.rstrip('.')}"
        await self._writer.leases(lambda leases: leases.publish_later(job, now, reason))

    async def _wait(self, job: Job) -> None:
        """Somebody else works in the job's folder: later."""
        later = self._writer.clock() + self._config.lease_seconds
        await self._writer.leases(lambda leases: leases.stopped(job, later))

    async def _fail(self, job: Job, failure: Failure) -> None:
        logger.warning("%s failed: %s", job.id, failure.message)
        now = self._writer.clock()
        await self._writer.leases(lambda leases: leases.failed(job, now, failure))
        self._stats.end(Status.FAILED)
