"""Carries out the calls of one live model, in their order, from its creation to its end. Knows the process, the saved
weights and the serving engine; knows no HTTP and no other model."""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable

from server.errors import (
    InsufficientStorage,
    InvalidRequest,
    LongwaveError,
    RequestFailedError,
    TrainingDiverged,
    TrainingMissing,
    TrainingOutOfMemory,
)
from server.training.calls import (
    Call,
    Compute,
    Computed,
    Created,
    Loaded,
    LoadWeights,
    OptimStep,
    Outcome,
    Sample,
    Saved,
    SaveWeights,
    Stepped,
    Unload,
    Unloaded,
)
from server.training.child import Child, ChildEndedError, WorkFailedError
from server.training.futures import Future
from server.training.live import LiveModel
from server.training.messages import Done, FailureKind, Load, Remove, Save, Work
from server.training.sampling import Serving, sample
from server.training.saving import Saving
from server.training.snapshots import Snapshot, Snapshots
from server.training.stats import TrainingStats

logger = logging.getLogger("longwave")

ERRORS: dict[FailureKind, type[LongwaveError]] = {
    "invalid": InvalidRequest,
    "diverged": TrainingDiverged,
    "memory": TrainingOutOfMemory,
    "storage": InsufficientStorage,
    "internal": RequestFailedError,
}
#: What the process's refusals begin with where they are about one field of the call; what that field is in.
FIELD = re.compile(r"(target_modules|data\[\d+\]): ")
FIELD_PLACES = {"target_modules": "lora_config."}


class Runner:
    def __init__(
        self,
        model: LiveModel,
        child: Child,
        saving: Saving,
        snapshots: Snapshots,
        serving: Serving,
        stats: TrainingStats,
        gap_seconds: float,
    ) -> None:
        self.model = model
        self.child = child
        self._saving = saving
        self._snapshots = snapshots
        self._serving = serving
        self._stats = stats
        self._gap_seconds = gap_seconds
        self._snapshot: tuple[int, Snapshot] | None = None  # of which version
        self._samples: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Returns when the model has ended; nothing of it is in the engine then."""
        model = self.model
        try:
            await self._settle(model.creating, self._create())
            if isinstance(model.creating.outcome, LongwaveError):
                model.finish(model.creating.outcome)
            while model.end is None:
                future = await model.sequence.next(self._gap_seconds)
                call = future.call
                assert call is not None
                if isinstance(call, Sample):
                    await self._begin_sample(future, call)
                else:
                    await self._settle(future, self._carry_out(call))
                model.sequence.pass_on(future)
                if isinstance(future.outcome, Unloaded):
                    model.finish(TrainingMissing(f"The model {model.id} was unloaded.", param="model_id"))
        except Exception:  # a mistake of ours: nobody shall wait for calls that nobody carries out
            logger.exception("%s is given up", model.id)
            model.finish(model.lost("The server failed"))
            await self.remove()
        finally:
            for task in self._samples:
                task.cancel()
            if self._samples:
                await asyncio.wait(self._samples)
            await self._drop_snapshot()

    async def remove(self) -> None:
        """Out of the process's memory."""
        try:
            await self.child.ask(self.model.id, Remove())
        except (ChildEndedError, WorkFailedError) as error:
            logger.info("%s was not removed: %s", self.model.id, error)

    async def autosave(self) -> None:
        """What it has learnt, beside whatever the process computes. Raises LongwaveError, ChildEndedError."""
        self.model.remember(await self._saving.autosave(self.model, self._ask))

    async def _settle(self, future: Future, work: Awaitable[Outcome]) -> None:
        """The future ends, whatever the work does."""
        kind = type(future.call).__name__
        try:
            future.end(await work)
        except LongwaveError as error:
            future.end(error)
        except ChildEndedError as error:
            self.model.finish(self.model.lost(str(error)))
        except Exception:
            logger.exception("%s failed", future.request_id)
            future.end(RequestFailedError("The server failed to carry out this call."))
        failed = isinstance(future.outcome, LongwaveError)
        self._stats.calls[kind, "failed" if failed else "succeeded"] += 1
        self.model.last_used = time.monotonic()

    async def _create(self) -> Created:
        done = await self._ask(self.model.create)
        return Created(self.model.id, done.parameters)

    async def _carry_out(self, call: Call) -> Outcome:
        model = self.model
        match call:
            case Compute():
                done = await self._ask(call)
                self._stats.tokens += done.tokens
                return Computed(done.loss, done.tokens, done.clipped, done.logprobs)
            case OptimStep():
                done = await self._ask(call)
                model.version += 1
                model.steps = done.steps
                return Stepped(done.grad_norm, done.steps)
            case SaveWeights():
                return await self._save(call)
            case LoadWeights():
                return await self._load(call)
            case Unload():
                if self._samples:  # they came before it
                    await asyncio.wait(self._samples)
                await self._ask(Remove())
                return Unloaded(model.id)
        raise TypeError(f"{type(call).__name__} is no call of a live model")

    async def _save(self, call: SaveWeights) -> Saved:
        saved = await self._saving.save(self.model, call, self._ask)
        self.model.remember(saved)
        return saved

    async def _load(self, call: LoadWeights) -> Loaded:
        saved = await self._saving.find(call.path, self.model.owner)
        done = await self._ask(Load(str(saved.folder), call.optimizer))
        self.model.version += 1
        self.model.steps = done.steps
        return Loaded(call.path, done.steps)

    async def _begin_sample(self, future: Future, call: Sample) -> None:
        """Returns when the weights are held fast: what comes later in the sequence does not change this sample, and
        samples run together."""
        try:
            snapshot = await self._current()
        except Exception as error:
            await self._settle(future, _raise(error))
            return
        snapshot.num_users += 1

        async def run() -> None:
            try:
                await self._settle(future, sample(self._serving, snapshot.name, call, self.model.salt))
            finally:
                snapshot.num_users -= 1
                await self._snapshots.release(snapshot)

        task = asyncio.create_task(run(), name=future.request_id)
        self._samples.add(task)
        task.add_done_callback(self._samples.discard)

    async def _current(self) -> Snapshot:
        version = self.model.version
        if self._snapshot is None or self._snapshot[0] != version:
            await self._drop_snapshot()
            made = await self._snapshots.make(self.model.id, lambda folder: self._ask(Save(str(folder), False, {})))
            self._snapshot = (version, made)
        return self._snapshot[1]

    async def _drop_snapshot(self) -> None:
        if self._snapshot is not None:
            snapshot = self._snapshot[1]
            self._snapshot = None
            snapshot.is_current = False
            await self._snapshots.release(snapshot)

    async def _ask(self, work: Work) -> Done:
        try:
            return await self.child.ask(self.model.id, work)
        except WorkFailedError as error:
            raise _error(error) from None


async def _raise(error: Exception) -> Outcome:
    raise error


def _error(failure: WorkFailedError) -> LongwaveError:
    text = str(failure).rstrip(".")
    field = FIELD.match(text) if failure.kind == "invalid" else None
    if field is not None:
        return InvalidRequest(f"{text}.", param=FIELD_PLACES.get(field[1], "") + field[1])
    message = f"{text[:1].upper()}{text[1:]}."
    if failure.kind == "weights":
        return InvalidRequest(message, param="path")
    return ERRORS[failure.kind](message)
