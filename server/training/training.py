"""Low-level training as the API sees it: make models, submit calls, find what came of them. Checks what a call means;
must not know HTTP or tensors. All of it runs on one event loop."""

import asyncio
import logging
import secrets
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any

from server.errors import (
    InvalidRequest,
    QuotaExceeded,
    RequestFailedError,
    SequenceConflict,
    ServerDraining,
    TrainingMissing,
)
from server.training.calls import Call, Create, NewModel, digest
from server.training.checks import check
from server.training.child import Child, ChildEndedError
from server.training.config import TrainingConfig
from server.training.futures import Future
from server.training.live import LiveModel
from server.training.runner import Runner
from server.training.sampling import Serving
from server.training.saving import Saving
from server.training.shared import SharedChild
from server.training.snapshots import Snapshots
from server.training.stats import TrainingStats
from server.training.weights import AUTOSAVE, SavedWeights, WeightsStore

logger = logging.getLogger("longwave")

TIDY_SECONDS = 5.0  # between two looks at what is idle, or kept long enough
SWEEP_TURNS = 120  # of those, one that also looks at what crashes have left on the disk


class Training:
    """`owner` is a name for the key of whoever asks; other owners' models, futures and weights do not exist for it."""

    def __init__(self, root: Path, config: TrainingConfig, serving: Serving) -> None:
        self.config = config
        self.stats = TrainingStats()
        self.shared = SharedChild(config, serving, self._lose)
        self._serving = serving
        self._saving = Saving(config, WeightsStore(root / "saved"), serving)
        self._snapshots = Snapshots(root / "snapshots", serving)
        self._models: dict[str, LiveModel] = {}
        self._runners: dict[str, tuple[Runner, asyncio.Task[None]]] = {}
        self._keys: dict[tuple[str, str], str] = {}  # idempotency keys of an owner -> model
        self._num_leaving = 0  # models that are being saved or removed
        self._last_saves: set[asyncio.Future[None]] = set()  # of those, until they have ended
        self._tasks: set[asyncio.Task[None]] = set()
        self._mending: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serves again what was saved to be served, and sweeps what crashes left. Never raises."""
        await self._snapshots.start()
        await self._saving.start()
        self._spawn(self._tidy(), "training-tidy")

    async def drain(self) -> None:
        """Lets the calls that were taken end, and saves each model when its own have; until then what it has learnt
        before them is saved. No call comes meanwhile."""
        await asyncio.gather(*(self._drain(model) for model in self.live()))
        while self._last_saves:  # of models that were unloaded just before, or meanwhile
            await asyncio.wait(self._last_saves)

    async def close(self) -> None:
        """Ends everything, at once."""
        tasks = [*self._tasks, *(task for _, task in self._runners.values())]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for model in self.live():
            num_open = len(model.sequence.pending) + (model.creating.outcome is None)
            learnt = model.way_on if model.version else "It had learnt nothing."
            logger.warning("%s ends with the server; calls that have not ended: %d. %s", model.id, num_open, learnt)
            model.finish(ServerDraining("The server was shut down."))
        await self.shared.end()
        await self._saving.close()
        self._snapshots.close()

    async def create(
        self, owner: str, base_model: str, asked: NewModel, *, salt: bytes = b"", key: str | None = None
    ) -> LiveModel:
        """Its future is `model.creating`. `key`: the same one gives the same model. Raises InvalidRequest,
        SequenceConflict, QuotaExceeded."""
        create = Create(asked.rank or self.config.default_rank, asked.alpha, asked.target_modules, asked.seed)
        known = self._models.get(self._keys.get((owner, key), "")) if key is not None else None
        if known is not None:
            if known.creating.digest != digest(create) or known.base_model != base_model:
                raise SequenceConflict("This Idempotency-Key was used for another model.")
            return known
        if create.rank > self.config.max_rank:
            raise InvalidRequest(
                f"rank is {create.rank}; this server serves adapters up to rank {self.config.max_rank} "
                "(--max-lora-rank).",
                param="lora_config.rank",
            )
        if len(self.live()) >= self.config.max_models:
            raise QuotaExceeded(
                f"{self.config.max_models} models are live, as many as this server has room for: unload one first."
            )
        self._forget_ended(owner)
        model = LiveModel(f"train-{secrets.token_hex(16)}", owner, salt, base_model, create, self.config)
        self._models[model.id] = model
        self.stats.models = len(self.live())
        if key is not None:
            self._keys[owner, key] = model.id
        self._spawn(self._begin(model), model.id)
        return model

    def submit(self, model: LiveModel, seq_id: int | None, call: Call) -> Future:
        """Raises what ended the model, SequenceConflict, InvalidRequest, ServerOverloaded."""
        known = None if seq_id is None else model.sequence.find(seq_id)
        if known is None and model.end is not None:
            raise model.end.with_traceback(None)  # it is raised often, and would remember each time
        check(call, self.config, self.shared.ready)
        model.last_used = time.monotonic()
        return model.sequence.submit(seq_id, call)

    def model(self, model_id: str, owner: str) -> LiveModel:
        """Live, or ended a while ago. Raises TrainingMissing."""
        model = self._models.get(model_id)
        if model is None or model.owner != owner:
            raise TrainingMissing(f"There is no model {model_id:.64}, or it was unloaded.", param="model_id")
        return model

    def future(self, request_id: str, owner: str) -> Future:
        """Raises TrainingMissing."""
        model_id, _, seq_id = request_id.rpartition(":")
        model = self._models.get(model_id)
        future = None
        if model is not None and model.owner == owner and seq_id.isascii() and seq_id.isdecimal():
            future = model.find(int(seq_id))
        if future is None:
            raise TrainingMissing(
                f"There is no future {request_id:.96}. Results are kept for {self.config.result_seconds:g} s, the last "
                f"{self.config.max_results} of a model.",
                param="request_id",
            )
        return future

    def live(self, owner: str | None = None) -> list[LiveModel]:
        return [model for model in self._models.values() if model.end is None and owner in (None, model.owner)]

    async def delete(self, model: LiveModel) -> None:
        """At once: its calls fail. What was saved stays."""
        if model.end is None:
            model.finish(TrainingMissing(f"The model {model.id} was deleted.", param="model_id"))
            await self._leave(model)

    async def saved(self, owner: str) -> list[SavedWeights]:
        return await self._saving.of(owner)

    async def delete_weights(self, path: str, owner: str) -> None:
        """Running answers of it are finished. Raises InvalidRequest, TrainingMissing, InsufficientStorage."""
        await self._saving.delete(path, owner)
        for model in self._models.values():
            model.forget(path)

    async def _begin(self, model: LiveModel) -> None:
        """Brings up the process if there is none; then the model's runner has it, to its end."""
        if self._mending is not None:
            await asyncio.wait([self._mending])
        try:
            child = await self.shared.get()
        except ChildEndedError as error:
            model.finish(RequestFailedError(f"{error}."))
        except OSError as error:
            logger.error("no training process could be started: %s", error)
            model.finish(RequestFailedError("The server could not start a training process."))
        if model.end is None:
            runner = Runner(
                model, child, self._saving, self._snapshots, self._serving, self.stats, self.config.gap_seconds
            )
            task = asyncio.create_task(runner.run(), name=model.id)
            self._runners[model.id] = (runner, task)
            await asyncio.wait([task])
            if self._runners.get(model.id) == (runner, task):  # else somebody else sees to its end
                del self._runners[model.id]
                await self._snapshots.forget(model.id)
        await self._end_child_if_idle()

    def _lose(self, child: Child, reason: str) -> None:
        """The process ended by itself: every model in it is lost."""
        self.stats.crashes += 1
        self._mending = self._spawn(self._saving.mend(), "training-mend")
        for runner, task in list(self._runners.values()):
            if runner.child is child:
                runner.model.finish(runner.model.lost(reason))
                task.cancel()

    async def _end_child_if_idle(self) -> None:
        """Nobody's memory is held for nothing."""
        self.stats.models = len(self.live())
        if not self.live() and not self._runners and not self._num_leaving:
            await self.shared.end()

    async def _drain(self, model: LiveModel) -> None:
        model.sequence.close()
        open_calls = [future for future in (model.creating, *model.sequence.pending) if future.outcome is None]
        if open_calls and model.version and (runner := self._runners.get(model.id)) is not None:
            await self._save_early(runner[0])
        await asyncio.gather(*(future.ended.wait() for future in open_calls))
        if model.end is None:
            await self._put_away(model, "The server was shut down.")

    async def _save_early(self, runner: Runner) -> None:
        """What it has learnt before its open calls, which may not end in time. Never raises."""
        try:
            await runner.autosave()
        except Exception:
            logger.exception("%s could not be saved before its calls have ended", runner.model.id)

    async def _put_away(self, model: LiveModel, reason: str) -> None:
        """Saves what it has learnt, and unloads it. `reason`: a sentence."""
        kept = "It had learnt nothing."
        if model.version:
            kept = f"Its weights were saved as {WeightsStore.path(model.id, 'weights', AUTOSAVE)}."
        model.finish(TrainingMissing(f"The model {model.id} was unloaded. {reason} {kept}", param="model_id"))
        await self._leave(model, save=model.version > 0)

    async def _leave(self, model: LiveModel, *, save: bool = False) -> None:
        """Of a model that has ended: what it holds is given back. Never raises."""
        runner, task = self._runners.pop(model.id, (None, None))
        if runner is None or task is None:
            return
        self._num_leaving += 1
        try:
            with self._awaited_by_drain() if save else nullcontext():
                task.cancel()
                await asyncio.wait([task])
                if save:
                    await self._save_last(runner)
                save = False
            await runner.remove()
            await self._snapshots.forget(model.id)
        except asyncio.CancelledError:
            if save:
                logger.warning("%s ends with the server, before its last save. %s", model.id, model.way_on)
            raise
        except Exception:
            logger.exception("%s has left something behind", model.id)
        finally:
            self._num_leaving -= 1
        await self._end_child_if_idle()

    async def _save_last(self, runner: Runner) -> None:
        try:
            await runner.autosave()
        except Exception:
            logger.exception("%s could not be saved", runner.model.id)
            runner.model.end = runner.model.unsaved()

    @contextmanager
    def _awaited_by_drain(self) -> Iterator[None]:
        """What is inside, from the moment on in which the model is none of the live ones any more."""
        ended = asyncio.get_running_loop().create_future()
        self._last_saves.add(ended)
        try:
            yield
        finally:
            self._last_saves.discard(ended)
            ended.set_result(None)

    def _forget_ended(self, owner: str) -> None:
        """The oldest beyond what is kept: who makes and deletes them without end must not fill the memory."""
        ended = [model for model in self._models.values() if model.owner == owner and model.end is not None]
        ended.sort(key=lambda model: model.ended_at)
        for model in ended[: -self.config.max_ended]:
            del self._models[model.id]
        self._forget_keys()

    def _forget_keys(self) -> None:
        self._keys = {key: model_id for key, model_id in self._keys.items() if model_id in self._models}

    async def _tidy(self) -> None:
        for turn in count(1):
            await asyncio.sleep(min(TIDY_SECONDS, self.config.idle_seconds / 4))
            try:
                await self._tidy_models()
                await self._saving.serve_waiting()
                if turn % SWEEP_TURNS == 0:
                    await self._saving.sweep()
            except Exception:
                logger.exception("what is idle or old was not tidied")

    async def _tidy_models(self) -> None:
        now = time.monotonic()
        for model in list(self._models.values()):
            model.sequence.forget(now - self.config.result_seconds)
            if model.end is None and model.is_idle and now - model.last_used > self.config.idle_seconds:
                await self._put_away(model, f"There was no call for {self.config.idle_seconds:g} s.")
            if model.end is not None and now - model.ended_at > self.config.result_seconds:
                self._models.pop(model.id, None)
        self._forget_keys()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("low-level training failed", exc_info=error)
