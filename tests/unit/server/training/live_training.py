"""Low-level training at work: real processes, futures, folders; the process's session and the engine are scripted."""

import asyncio
import json
import os
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import MAX_MODEL_LEN, MODEL, VOCAB_SIZE, ScriptedEngine, tiny_tokenizer

from server.engine.messages import EngineReady
from server.engine.token_ids import TokenIds
from server.text.tokenizer import TextTokenizer
from server.training import (
    Call,
    Compute,
    Future,
    LiveModel,
    LoadWeights,
    NewModel,
    OptimStep,
    Outcome,
    PackedDatum,
    Sample,
    SaveWeights,
    Training,
    TrainingConfig,
)

Run = Callable[..., None]

LIMIT = 60.0  # seconds for anything to happen: generous, since the machine may be busy
NEW = NewModel(8, 32, None, 0)
STEP = OptimStep(1e-4, 0.9, 0.95, 1e-12, 0.0, 0.0)
SAMPLE = Sample(TokenIds((1, 2, 3)), 1, 5, 1.0, -1, 1.0, None, (), ())


def compute(*tokens: int, backward: bool = True) -> Compute:
    data = array("i", tokens or (1, 2, 3)).tobytes()
    return Compute((PackedDatum(data, data),), "cross_entropy", backward, 0.8, 1.2)


def save(name: str = "one", **changes: Any) -> SaveWeights:
    return SaveWeights(name, **{"kind": "weights", "serve": False, "overwrite": False, **changes})


def load(model: LiveModel, name: str = "one", *, optimizer: bool = True) -> LoadWeights:
    return LoadWeights(f"longwave://{model.id}/weights/{name}", optimizer)


@dataclass
class Door:
    tokenizer: TextTokenizer = field(default_factory=lambda: TextTokenizer(tiny_tokenizer()))
    ready: EngineReady = field(
        default_factory=lambda: EngineReady(MODEL, "cpu", "float32", MAX_MODEL_LEN, VOCAB_SIZE, [], 64, 100, {})
    )
    reserved: int = 0

    @contextmanager
    def reserve(self, num_sequences: int, tenant: bytes) -> Iterator[None]:
        self.reserved += num_sequences
        try:
            yield
        finally:
            self.reserved -= num_sequences


@dataclass
class Serving:
    engine: ScriptedEngine = field(default_factory=ScriptedEngine)
    door: Door = field(default_factory=Door)
    max_model_len: int | None = MAX_MODEL_LEN

    def open_door(self) -> Door:
        return self.door


@dataclass
class Work:
    training: Training
    engine: ScriptedEngine
    door: Door
    folder: Path

    async def create(self, owner: str = "me", **changes: Any) -> LiveModel:
        model = await self.training.create(owner, "base", NEW, **changes)
        await self.outcome(model.creating)
        return model

    def submit(self, model: LiveModel, *calls: Call) -> list[Future]:
        return [self.training.submit(model, None, call) for call in calls]

    async def do(self, model: LiveModel, *calls: Call) -> list[Any]:
        return [await self.outcome(future) for future in self.submit(model, *calls)]

    async def outcome(self, future: Future) -> Outcome | Exception | None:
        await asyncio.wait_for(future.ended.wait(), LIMIT)
        return future.outcome

    @property
    def pid(self) -> int | None:
        child = self.training.shared.child
        return None if child is None else child.pid

    def log(self) -> list[str]:
        path = self.folder / "log"
        return path.read_text().splitlines() if path.exists() else []


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def until(condition: Any) -> None:
    async with asyncio.timeout(LIMIT):
        while not condition():
            await asyncio.sleep(0.01)  # between two looks at the condition


def script(folder: Path, monkeypatch: pytest.MonkeyPatch, **what: Any) -> Path:
    """What the process of this test does from now on; the returned file lets it go on where it holds."""
    monkeypatch.setenv("TRAINING_SCRIPT", str(write_script(folder, what)))
    return folder / "go"


def write_script(folder: Path, what: dict[str, Any]) -> Path:
    """At once: a process that reads it meanwhile reads the one or the other, and never half of one."""
    new = folder / "script.new"
    new.write_text(json.dumps(what))
    return new.replace(folder / "script.json")


@asynccontextmanager
async def at_work(folder: Path, *, start: bool = True, **changes: Any) -> AsyncIterator[Work]:
    config = TrainingConfig("base", worker="scripted_training_worker", **changes)
    serving = Serving()
    training = Training(folder / "training", config, serving)
    if start:
        await training.start()
    try:
        yield Work(training, serving.engine, serving.door, folder)
    finally:
        serving.engine.resume.set()
        (folder / "go").touch()
        await training.close()
