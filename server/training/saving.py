"""Saves a live model's weights under a name, within the owner's quota, and serves them where that is asked for.

Knows the store and the serving engine; the process does the writing.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from server.errors import InsufficientStorage, InvalidRequest, LongwaveError, ModelNotFound, QuotaExceeded
from server.training.calls import Saved, SaveWeights
from server.training.config import TrainingConfig
from server.training.live import LiveModel
from server.training.messages import Done, Save, Work
from server.training.sampling import Serving
from server.training.weights import LABEL, Label, SavedWeights, WeightsStore

logger = logging.getLogger("longwave")

Ask = Callable[[Work], Awaitable[Done]]


class Saving:
    def __init__(self, config: TrainingConfig, store: WeightsStore, serving: Serving) -> None:
        self._config = config
        self._store = store
        self._serving = serving

    async def find(self, path: str, owner: str) -> SavedWeights:
        """Weights that a model may load. Raises InvalidRequest, TrainingMissing."""
        saved = await asyncio.to_thread(self._store.find, path, owner)
        if saved.label.base_model != self._config.source:
            raise InvalidRequest(f"{path} was trained on another base model.", param="path")
        return saved

    async def save(self, model: LiveModel, call: SaveWeights, ask: Ask, *, always: bool) -> Saved:
        """`always`: whatever the quota says. Raises what `ask` raises, InvalidRequest, QuotaExceeded,
        InsufficientStorage, and what loading an adapter does: then nothing is kept."""
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
        files = {LABEL: msgspec.json.encode(label).decode()}
        await ask(Save(str(folder), call.kind == "weights", files))
        if call.serve:
            await self._serve(path, folder, model.owner)
        elif before is not None and before.label.served:
            await self._stop_serving(path)
        return Saved(path, call.kind, model.steps)

    def _prepare(self, path: str) -> Path:
        try:
            return self._store.prepare(path)
        except OSError as error:
            logger.error("weights cannot be saved: %s", error)
            raise InsufficientStorage("The server cannot keep weights: its data directory cannot be used.") from error

    async def _serve(self, path: str, folder: Path, owner: str) -> None:
        try:
            await self._serving.engine.load_adapter(path, str(folder), owner=owner, replace=True)
        except LongwaveError:
            await asyncio.to_thread(lambda: self._store.remove(self._store.find(path, owner)))
            await self._stop_serving(path)  # what it was before, if anything
            raise

    async def _stop_serving(self, path: str) -> None:
        with suppress(ModelNotFound):
            await self._serving.engine.unload_adapter(path)
