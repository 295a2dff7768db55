"""Saves a live model's weights under a name, within the owner's quota, and serves them where that is asked for: also
after a restart, until they are deleted.

Knows the store and the serving engine; the process does the writing.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from server.errors import (
    EngineUnavailable,
    InsufficientStorage,
    InvalidRequest,
    LongwaveError,
    ModelNotFound,
    QuotaExceeded,
)
from server.training.calls import Saved, SaveWeights
from server.training.config import TrainingConfig
from server.training.live import LiveModel
from server.training.messages import Done, Save, Work
from server.training.sampling import Serving
from server.training.weights import AUTOSAVE, LABEL, Label, SavedWeights, WeightsStore
from server.uninterrupted import Uninterrupted

logger = logging.getLogger("longwave")

T = TypeVar("T")

Ask = Callable[[Work], Awaitable[Done]]
LATER = EngineUnavailable | QuotaExceeded  # from an engine that restarts, or has no room


class Saving:
    def __init__(self, config: TrainingConfig, store: WeightsStore, serving: Serving) -> None:
        self._config = config
        self._store = store
        self._serving = serving
        self._turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # of an owner's saves
        self._saves = Uninterrupted()
        self._waiting: list[SavedWeights] = []  # for an engine that can take them

    async def start(self) -> None:
        """Puts right what crashes left, and serves again what was saved to be served. Never raises."""
        await self.mend()
        await self.sweep()
        for saved in await self._look(self._store.all) or ():
            if saved.label.served and saved.label.base_model == self._config.source:
                error = await self._serve_again(saved)
                if error is not None:
                    logger.error("%s is not served: %s", saved.label.path, error.message)
                if isinstance(error, LATER):
                    self._waiting.append(saved)

    async def serve_waiting(self) -> None:
        """What the engine could not take when the server started."""
        self._waiting = [saved for saved in self._waiting if await self._has_to_wait(saved)]

    async def _has_to_wait(self, saved: SavedWeights) -> bool:
        turn = self._turns[saved.label.owner]
        if turn.locked():  # by a save that may be of the same name, and takes as long as the process's calls
            return True
        async with turn:
            return isinstance(await self._serve_again(saved), LATER)

    async def close(self) -> None:
        """Once the process has ended: what nobody waits for any more ends, too."""
        await self._saves.close()

    async def mend(self) -> None:
        """While no process of this server writes. Never raises."""
        await self._look(self._store.mend)

    async def sweep(self) -> None:
        """Never raises."""
        await self._look(self._store.sweep)

    async def _look(self, at: Callable[[], T]) -> T | None:
        try:
            return await asyncio.to_thread(at)
        except OSError as error:
            logger.error("saved weights cannot be looked at: %s", error)
            return None

    async def of(self, owner: str) -> list[SavedWeights]:
        return await asyncio.to_thread(self._store.of, owner)

    async def delete(self, path: str, owner: str) -> None:
        """Running answers of it are finished. Raises InvalidRequest, TrainingMissing; InsufficientStorage when the disk
        refuses: then they are served further."""
        saved = await asyncio.to_thread(self._store.find, path, owner)
        try:
            await asyncio.to_thread(self._store.remove, saved)
        except OSError as error:
            logger.error("%s cannot be deleted: %s", path, error)
            raise InsufficientStorage(
                "The weights cannot be deleted: the server's data directory cannot be used."
            ) from error
        if saved.label.served:
            await self._stop_serving(path)

    async def find(self, path: str, owner: str) -> SavedWeights:
        """Weights that a model may load. Raises InvalidRequest, TrainingMissing."""
        saved = await asyncio.to_thread(self._store.find, path, owner)
        if saved.label.base_model != self._config.source:
            raise InvalidRequest(f"{path} was trained on another base model.", param="path")
        return saved

    async def save(self, model: LiveModel, call: SaveWeights, ask: Ask) -> Saved:
        """Raises what `ask` raises, InvalidRequest, QuotaExceeded, InsufficientStorage, and what loading an adapter
        does: then nothing is kept that has replaced nothing."""
        turn = self._turns[model.owner]
        await turn.acquire()
        # A model that is deleted meanwhile does not leave weights that are to be served, and are not.
        return await self._saves.run(self._save(model, call, ask), turn.release)

    async def autosave(self, model: LiveModel, ask: Ask) -> Saved:
        """What stands now, whatever the process computes meanwhile and the quota says. Raises as `save` does."""
        call = SaveWeights(AUTOSAVE, "weights", serve=False, overwrite=True)
        return await self._save(model, call, ask, always=True)

    async def _save(self, model: LiveModel, call: SaveWeights, ask: Ask, *, always: bool = False) -> Saved:
        path = self._store.path(model.id, call.kind, call.name)
        others = await asyncio.to_thread(self._store.of, model.owner)
        before = next((saved for saved in others if saved.label.path == path), None)
        if before is not None and not call.overwrite:
            raise InvalidRequest(f"There are weights {path} already; `overwrite` replaces them.", param="path")
        if before is None and len(others) >= self._config.max_saved and not always:
            raise QuotaExceeded(
                f"{len(others)} weights are saved, as many as this server keeps for one owner (max_saved_weights): "
                "delete some first.",
                param="path",
            )
        folder = await asyncio.to_thread(self._prepare, path)
        label = Label(
            path=path,
            kind=call.kind,
            owner=model.owner,
            base_model=self._config.source,
            rank=model.create.rank,
            steps=model.steps,
            served=call.serve,
            created_at=int(time.time()),
        )
        done = await ask(_command(folder, label, beside=always))
        while done.steps != label.steps:  # steps that were waiting came first: no more than calls may wait
            label = msgspec.structs.replace(label, steps=done.steps)
            done = await ask(_command(folder, label, beside=always))
        if call.serve:
            await self._serve(path, folder, model.owner, keep=before is not None)
        elif before is not None and before.label.served:
            await self._stop_serving(path)
        return Saved(path, call.kind, label.steps)

    def _prepare(self, path: str) -> Path:
        try:
            return self._store.prepare(path)
        except OSError as error:
            logger.error("weights cannot be saved: %s", error)
            raise InsufficientStorage("The server cannot keep weights: its data directory cannot be used.") from error

    async def _serve(self, path: str, folder: Path, owner: str, *, keep: bool) -> None:
        """`keep`: also what cannot be served."""
        try:
            await self._serving.engine.load_adapter(path, str(folder), owner=owner, replace=True)
        except LongwaveError:
            if not keep:
                await asyncio.to_thread(lambda: self._store.remove(self._store.find(path, owner)))
            await self._stop_serving(path)  # what it was before, if anything
            raise

    async def _serve_again(self, saved: SavedWeights) -> LongwaveError | None:
        """Why they cannot be served, if they cannot; they may have been deleted meanwhile."""
        path, owner = saved.label.path, saved.label.owner
        try:
            now = await asyncio.to_thread(self._store.find, path, owner)
            if now.label.served:
                await self._serving.engine.load_adapter(path, str(now.folder), owner=owner)
        except LongwaveError as error:
            return error
        return None

    async def _stop_serving(self, path: str) -> None:
        with suppress(ModelNotFound):
            await self._serving.engine.unload_adapter(path)


def _command(folder: Path, label: Label, *, beside: bool) -> Save:
    return Save(str(folder), label.kind == "weights", {LABEL: msgspec.json.encode(label).decode()}, beside)
