"""One attempt at a job: a trainer process under a lease, from the claim to the moment when nobody works on it any more.
Knows no HTTP, no SQL and no mathematics. On the event loop."""

import asyncio
import contextlib
import logging
import os
import time
from pathlib import Path

import msgspec

from server.errors import InsufficientStorage
from server.finetune.config import TrainerConfig
from server.finetune.folders import Folders
from server.finetune.leases import LeaseLostError, Stage
from server.finetune.messages import (
    Arguments,
    Beat,
    Crashed,
    LastWord,
    Recorded,
    Started,
    Stepped,
    Stop,
    Stopped,
)
from server.finetune.process import TrainerProcess, UnreadableError
from server.finetune.records import Job, Status, Step
from server.finetune.settling import Settling
from server.finetune.stats import FineTuningStats
from server.finetune.writer import Writer
from server.signals import signal_name

logger = logging.getLogger("longwave")

RETRY_SECONDS = 1.0  # between attempts to write to a disk that is full


class Attempt:
    def __init__(
        self,
        job: Job,
        stage: Stage,
        config: TrainerConfig,
        writer: Writer,
        folders: Folders,
        settling: Settling,
        stats: FineTuningStats,
        draining: asyncio.Event,
    ) -> None:
        self.job = job
        self._stage = stage
        self._config = config
        self._writer = writer
        self._folders = folders
        self._settling = settling
        self._stats = stats
        self._draining = draining
        self._heard = time.monotonic()
        self._told = job.checkpoint_step  # the last step
        self._has_begun = False  # to train: before that a trainer has nothing to keep
        self._stopping = False
        self._sent_away = False  # with nothing to keep
        self._lost = False  # somebody else has the job now, or nobody can write down what happens to it
        self._hung = False
        self._gone = False  # the trainer, if there was one; what became of the job is being written
        self.process: TrainerProcess | None = None

    async def run(self) -> None:
        """Whatever happens, cancellation too, no process is left, and no lease that this server could give back."""
        held = True
        no_room: str | None = None
        crash: str | None = None
        try:
            word: LastWord | None = self._settling.told_before(self.job)
            if word is None:
                self.process = await TrainerProcess.start(self._arguments(), self._config.worker)
            logger.info("%s of %s begins: attempt %d", self._stage.name, self.job.id, self.job.attempt)
            self._gone = word is not None
            watching = asyncio.create_task(self._watch())
            try:
                word = word or await self._hear()
                if not self._lost:
                    self._gone = True
                    await self._settling.settle(self.job, word)
                    held = False
            finally:
                watching.cancel()
                await asyncio.wait([watching])
        except LeaseLostError as error:
            held = False
            logger.info("%s", error)
        except (InsufficientStorage, OSError) as error:
            logger.error("%s is stopped: what it does cannot be written down: %s", self.job.id, error)
            no_room = "The server had no room to write down what the job does"
        except UnreadableError as error:
            logger.error("%s: its trainer is ended: %s", self.job.id, error)
            crash = "The trainer sent a message that cannot be read"
        except Exception:  # a mistake of ours: counted, so that it is not repeated for ever
            logger.exception("%s is stopped", self.job.id)
            crash = "The server could not work on the job"
        finally:
            if self.process is not None:
                await self.process.close()
            if held:
                await self._let_go(no_room, crash)

    async def _hear(self) -> LastWord:
        """To the end of the trainer. Raises UnreadableError."""
        process = self.process
        assert process is not None
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
        status = await process.wait()
        return last or self._without_a_word(status)

    async def _begin(self, told: Started) -> None:
        self._has_begun = True
        await self._writer.leases(lambda leases: leases.started(self.job, self._now(), told.device))

    async def _record(self, told: Stepped) -> Status:
        values = msgspec.structs.asdict(told)
        checkpoint, total = values.pop("checkpoint"), values.pop("total_steps")
        step = Step(**values)
        if step.step > self._told:  # a step is told again when it is in a checkpoint, and when a run begins with it
            self._stats.steps += 1
            self._stats.tokens += step.tokens
        self._told = step.step
        return await self._writer.leases(
            lambda leases: leases.stepped(self.job, self._now(), step, total, checkpoint=checkpoint)
        )

    async def _watch(self) -> None:
        """Keeps the lease, and looks what the owner wants; ends the process when the job is no longer this server's."""
        changed = self._writer.listen()
        draining = asyncio.create_task(self._draining.wait())
        draining.add_done_callback(lambda _: changed.set())
        try:
            while True:
                changed.clear()
                self._obey(await self._writer.leases(lambda leases: leases.beat(self.job, self._now())))
                if not self._gone and time.monotonic() - self._heard > self._config.silence_limit:
                    self._hung = True
                    self._kill()
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._config.beat_seconds):
                        await changed.wait()
        except (LeaseLostError, InsufficientStorage) as error:
            if self._gone:
                return
            self._lost = True
            logger.info("%s: its trainer is ended: %s", self.job.id, error)
            self._kill()
        finally:
            draining.cancel()
            self._writer.forget(changed)

    def _kill(self) -> None:
        if self.process is not None:
            self.process.kill()

    def _obey(self, status: Status) -> None:
        wanted = status in (Status.RUNNING, Status.VALIDATING) and not self._draining.is_set()
        if wanted or self._stopping or self.process is None:
            return
        self._stopping = True
        if self._has_begun:
            self.process.send(Stop())
        else:
            self._sent_away = True
            self.process.kill()

    def _without_a_word(self, status: int) -> LastWord:
        """`status`: the exit status of a trainer that has said nothing of its end."""
        if self._sent_away:
            return Stopped()
        return Crashed("The trainer did not answer any more" if self._hung else _ended(status))

    async def _let_go(self, no_room: str | None, crash: str | None) -> None:
        """Gives the lease back, as soon as that can be written. `crash`: why this attempt counts as one."""
        while True:
            try:
                if crash is not None:
                    return await self._settling.crashed(self.job, crash)
                if no_room is not None:
                    return await self._settling.no_room(self.job, no_room)
                return await self._writer.leases(lambda leases: leases.stopped(self.job))
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
            answering_fd=config.answering_fd,
            gpu_share=config.gpu_share,
            max_full_parameters=config.max_full_parameters if request.is_full else None,
        )


def _ended(status: int) -> str:
    if status >= 0:
        return f"The trainer ended without a word (exit status {status})"
    name = signal_name(-status)
    return f"The trainer was killed ({name}{': too little memory, perhaps' if name == 'SIGKILL' else ''})"


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
