"""The weights of now as temporary adapters of the serving engine: a folder each, gone when nobody samples from it.

Knows how folders outlive no server; must not know HTTP, samples, or how weights come about.
"""

import asyncio
import fcntl
import logging
import os
import secrets
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

from server.engine.adapter_registry import AdapterInfo
from server.errors import EngineUnavailable, InsufficientStorage, ModelNotFound
from server.files.folder import alone, make_private
from server.training.sampling import Serving
from server.training.weights import SCHEME

logger = logging.getLogger("longwave")


class Snapshot:
    """One version of a model's weights, as an adapter; it goes when nobody needs it any more."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.num_users = 0
        self.is_current = True


class Snapshots:
    """Folders of this server alone, gone with it: a crash's are swept by the next start."""

    def __init__(self, root: Path, serving: Serving) -> None:
        self._root = root
        self._serving = serving
        self._mine: Path | None = None
        self._lock: int | None = None
        self._numbers = count(1)
        self._undoing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Never raises."""
        try:
            await asyncio.to_thread(self.sweep)
        except OSError as error:
            logger.error("what servers have left that are no more cannot be swept: %s", error)

    async def make(self, model_id: str, save: Callable[[Path], Awaitable[object]]) -> Snapshot:
        """`save` writes PEFT's folder. Its name is known to this room only. Raises what `save` raises, and what loading
        an adapter does."""
        number = next(self._numbers)  # never used again: what is being removed is not what is being made
        folder = self._place() / f"{model_id}-{number}"
        await save(folder)
        snapshot = Snapshot(f"{SCHEME}{model_id}/current/{number}", folder)
        loading = asyncio.ensure_future(
            self._serving.engine.load_adapter(snapshot.name, str(folder), owner=f"training {secrets.token_hex(8)}")
        )
        try:
            await asyncio.shield(loading)
        except BaseException:  # cancelled, too: then the engine may have it in a moment
            undoing = asyncio.create_task(self._undo(snapshot, loading))
            self._undoing.add(undoing)
            undoing.add_done_callback(self._undoing.discard)
            raise
        return snapshot

    async def _undo(self, snapshot: Snapshot, loading: "asyncio.Future[AdapterInfo]") -> None:
        await asyncio.wait([loading])
        snapshot.is_current = False
        await self.release(snapshot)

    async def release(self, snapshot: Snapshot) -> None:
        """A sample of it has ended, or it is current no longer."""
        if snapshot.is_current or snapshot.num_users:
            return
        try:
            with suppress(ModelNotFound, EngineUnavailable):
                await self._serving.engine.unload_adapter(snapshot.name)
        finally:
            await asyncio.to_thread(shutil.rmtree, snapshot.folder, ignore_errors=True)

    async def forget(self, model_id: str) -> None:
        """Of a model that is no more: also what was being written when it ended."""
        await asyncio.to_thread(self._remove, model_id)

    def sweep(self) -> None:
        """What servers left that are no more. Raises OSError."""
        if not self._root.is_dir():
            return
        with alone(self._root / "lock"):
            dead = [folder for folder in self._root.glob("server-*") if not _held(folder / "lock")]
        for folder in dead:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        if self._mine is not None and self._lock is not None:
            shutil.rmtree(self._mine, ignore_errors=True)
            os.close(self._lock)
            self._mine = self._lock = None

    def _remove(self, model_id: str) -> None:
        for pattern in (f"{model_id}-*", f".{model_id}-*"):
            for folder in self._mine.glob(pattern) if self._mine is not None else ():
                shutil.rmtree(folder, ignore_errors=True)

    def _place(self) -> Path:
        """Held by a lock that ends with this process. Raises InsufficientStorage."""
        if self._mine is None:
            try:
                make_private(self._root)
                with alone(self._root / "lock"):
                    mine = self._root / f"server-{secrets.token_hex(8)}"
                    mine.mkdir(mode=0o700)
                    self._lock = os.open(mine / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                    fcntl.flock(self._lock, fcntl.LOCK_EX)
            except OSError as error:
                logger.error("weights cannot be sampled from: %s", error)
                raise InsufficientStorage(
                    "The server cannot keep weights: its data directory cannot be used."
                ) from error
            self._mine = mine
        return self._mine


def _held(lock: Path) -> bool:
    """Whether a living server has it. One that was killed while it removed its folder may have left none."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
