"""One attempt at a job: a trainer process under a lease, from the claim to the moment when nobody works on it any more.
Knows no HTTP, no SQL and no mathematics. On the event loop."""

import asyncio
import contextlib
import logging
import os
import signal
import time
from pathlib import Path

import msgspec

from models.training import PlanError
from server.errors import InsufficientStorage
from server.finetune.config import TrainerConfig
from server.finetune.finishing import Finishing
from server.finetune.folders import Folders
from server.finetune.hyperparameters import TooManyStepsError, make_plan, total_steps
from server.finetune.leases import TRAIN, LeaseLostError, Stage
from server.finetune.messages import (
    Arguments,
    Beat,
    Busy,
    Crashed,
    Finished,
    LastWord,
    Recorded,
    Refused,
    Started,
    Stepped,
    Stop,
    Stopped,
    Validated,
)
from server.finetune.process import TrainerProcess
from server.finetune.records import Failure, Job, Status, Step
from server.finetune.stats import FineTuningStats
from server.finetune.writer import Writer

logger = logging.getLogger("longwave")

RETRY_SECONDS = 1.0  # between attempts to write to a disk that is full
STORAGE_SECONDS = 10.0  # until a job is taken up again after that


class Attempt:
    def __init__(
        self,
        job: Job,
        stage: Stage,
        config: TrainerConfig,
        writer: Writer,
        folders: Folders,
        finishing: Finishing,
        stats: FineTuningStats,
        draining: asyncio.Event,
    ) -> None:
        self.job = job
        self._stage = stage
        self._config = config
        self._writer = writer
        self._folders = folders
        self._finishing = finishing
        self._stats = stats
        self._draining = draining
        self._heard = time.monotonic()
        self._stopping = False
        self._lost = False  # somebody else has the job now, or nobody can write down what happens to it
        self._hung = False
        self._settling = False  # the trainer is gone; what became of the job is being written
        self.process: TrainerProcess | None = None

    async def run(self) -> None:
        """Whatever happens, cancellation too, no process is left, and no lease that this server could give back."""
        held, not_before = True, 0.0
        try:
            self.process = await TrainerProcess.start(self._arguments(), self._config.worker)
            logger.info("%s of %s begins: attempt %d", self._stage.name, self.job.id, self.job.attempt)
            watching = asyncio.create_task(self._watch(self.process))
            try:
                word = await self._read(self.process)
                status = await self.process.wait()
                if not self._lost:
                    self._settling = True
                    await self._settle(word, status)
                    held = False
            finally:
                watching.cancel()
                await asyncio.wait([watching])
        except LeaseLostError as error:
            held = False
            logger.info("%s", error)
        except (InsufficientStorage, OSError) as error:
            logger.error("%s is stopped: what it does cannot be written down: %s", self.job.id, error)
            not_before = self._now() + STORAGE_SECONDS
        finally:
            if self.process is not None:
                await self.process.close()
            if held:
                await self._let_go(not_before)

    async def _read(self, process: TrainerProcess) -> LastWord | None:
        """To the end of what the trainer says."""
        last: LastWord | None = None
        while (message := await process.receive()) is not None:
            self._heard = time.monotonic()
            match message:
                case Beat():
                    pass
                case Started():
                    await self._begin(message)
                case Stepped():
                    self._obey(await self._record(message))
                    process.send(Recorded())
                case _:
                    last = message
            if not isinstance(message, Beat):
                self._writer.announce_news()
        return last

    async def _begin(self, told: Started) -> None:
        await self._writer.leases(lambda leases: leases.started(self.job, self._now(), told.device))

    async def _record(self, told: Stepped) -> Status:
        values = msgspec.structs.asdict(told)
        checkpoint, total = values.pop("checkpoint"), values.pop("total_steps")
        step = Step(**values)
        self._stats.steps += 1
        self._stats.tokens += step.tokens
        return await self._writer.leases(
            lambda leases: leases.stepped(self.job, self._now(), step, total, checkpoint=checkpoint)
        )

    async def _watch(self, process: TrainerProcess) -> None:
        """Keeps the lease, and looks what the owner wants; ends the process when the job is no longer this server's."""
        changed = self._writer.listen()
        draining = asyncio.create_task(self._draining.wait())
        draining.add_done_callback(lambda _: changed.set())
        try:
            while True:
                changed.clear()
                self._obey(await self._writer.leases(lambda leases: leases.beat(self.job, self._now())))
                if not self._settling and time.monotonic() - self._heard > self._config.silence_limit:
                    self._hung = True
                    process.kill()
                    return
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), self._config.beat_seconds)
        except (LeaseLostError, InsufficientStorage) as error:
            if self._settling:
                return
            self._lost = True
            logger.info("%s: its trainer is ended: %s", self.job.id, error)
            process.kill()
        finally:
            draining.cancel()
            self._writer.forget(changed)

    def _obey(self, status: Status) -> None:
        wanted = status in (Status.RUNNING, Status.VALIDATING) and not self._draining.is_set()
        if wanted or self._stopping or self.process is None:
            return
        self._stopping = True
        if self._stage is TRAIN:
            self.process.send(Stop())
        else:
            self.process.kill()  # there is nothing to keep

    async def _settle(self, word: LastWord | None, status: int) -> None:
        job, leases = self.job, self._writer.leases
        match word:
            case Validated():
                await self._validated(word)
            case Finished():
                await self._finishing.finish(job, word)
                self._stats.end(Status.SUCCEEDED)
            case Stopped():
                await leases(lambda held: held.stopped(job))
            case Busy():
                wait = self._now() + self._config.lease_seconds
                await leases(lambda held: held.stopped(job, wait))
            case Refused(code=code, message=text, param=param):
                await self._fail(Failure(code, text, param))
            case Crashed(reason=reason):
                await self._crashed(reason)
            case None if self._stopping and self._stage is not TRAIN:
                await leases(lambda held: held.stopped(job))
            case None:
                await self._crashed("The trainer did not answer any more" if self._hung else _ended(status))
        self._writer.announce()

    async def _validated(self, files: Validated) -> None:
        job, config = self.job, self._config
        try:
            plan = make_plan(
                job.request,
                job.source,
                job.seed,
                files,
                checkpoint_every=config.checkpoint_every,
                micro_batch_tokens=config.micro_batch_tokens,
                default_rank=config.default_rank,
            )
        except (PlanError, TooManyStepsError) as error:
            return await self._fail(Failure("invalid_hyperparameters", str(error), "hyperparameters"))
        steps = total_steps(files.examples, plan.n_epochs, plan.batch_size)
        summary = f"{files.examples} training examples, {files.tokens} tokens, the longest {files.longest}"
        if files.validation_examples:
            summary += f"; {files.validation_examples} validation examples"
        now, text = self._now(), plan.to_json()
        await self._writer.leases(lambda leases: leases.validated(job, now, text, steps, summary))
        return None

    async def _fail(self, failure: Failure) -> None:
        logger.warning("%s failed: %s", self.job.id, failure.message)
        await self._writer.leases(lambda leases: leases.failed(self.job, self._now(), failure))
        self._stats.end(Status.FAILED)

    async def _crashed(self, reason: str) -> None:
        logger.warning("%s: %s", self.job.id, reason)
        self._stats.crashes += 1
        if await self._writer.leases(lambda leases: leases.crashed(self.job, self._now(), reason)):
            self._stats.end(Status.FAILED)

    async def _let_go(self, not_before: float) -> None:
        """Gives the lease back, as soon as that can be written."""
        while True:
            try:
                return await self._writer.leases(lambda leases: leases.stopped(self.job, not_before))
            except LeaseLostError:
                return None
            except InsufficientStorage:
                if self._draining.is_set():
                    return None  # it lapses
                await asyncio.sleep(RETRY_SECONDS)

    def _now(self) -> float:
        return self._writer.clock()

    def _arguments(self) -> Arguments:
        config, request = self._config, self.job.request
        return Arguments(
            stage=self._stage.name,
            model=config.source,
            method=request.method,
            folder=str(self._folders.job(self.job.id).path),
            device=config.device,
            cache_dir=_text(config.cache_dir),
            model_image_dir=_text(config.model_image_dir),
            max_length=config.max_length,
            plan=self.job.plan,
            validation=request.validation_file is not None,
            parent_pid=os.getpid(),
            log_level=logging.getLogger().getEffectiveLevel(),
        )


def _ended(status: int) -> str:
    if status >= 0:
        return f"The trainer ended without a word (exit status {status})"
    name = signal.Signals(-status).name
    return f"The trainer was killed ({name}{': too little memory, perhaps' if name == 'SIGKILL' else ''})"


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
