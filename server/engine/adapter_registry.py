"""The API process's record of the adapters that its engine serves: commands with replies, and what to load again into
an engine that was started anew. Knows folders and owners as text, no weights. All of it runs on one event loop."""

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from server.engine.messages import (
    AdapterLoaded,
    AdapterUnloaded,
    CommandFailed,
    CommandReply,
    LoadAdapter,
    ToEngine,
    UnloadAdapter,
)
from server.error_codes import from_code
from server.errors import AdapterExists, EngineUnavailable, InvalidAdapter, LongwaveError, ModelNotFound
from server.uninterrupted import Uninterrupted

logger = logging.getLogger(__name__)

#: Names go into paths of URLs and, joined by commas, into a metric's label.
NAME = re.compile(r"[\w.:@/+-]{1,256}", re.ASCII)

Send = Callable[[ToEngine], None]


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    name: str
    folder: str
    owner: str  # who may name it and see it: one API key's digest, or empty for everybody
    within: str | None
    digest: str  # SHA-256 of its files
    rank: int
    num_layers: int
    base_model: str | None  # what it says it was trained for
    created: int  # when its weights were written, in seconds since 1970: the same after a restart


class AdapterRegistry:
    def __init__(self) -> None:
        self._infos: dict[str, AdapterInfo] = {}  # oldest first
        self._replies: dict[int, asyncio.Future[CommandReply]] = {}
        self._busy: dict[str, asyncio.Event] = {}  # names that are being loaded -> when that has ended
        self._loads = Uninterrupted()
        self._command_ids = count(1)

    def infos(self) -> tuple[AdapterInfo, ...]:
        return tuple(self._infos.values())

    async def load(
        self, send: Send, name: str, folder: str, *, owner: str, within: str | None, replace: bool
    ) -> AdapterInfo:
        """Raises InvalidAdapter, AdapterExists, QuotaExceeded, EngineUnavailable, and has then changed nothing."""
        if not NAME.fullmatch(name):
            raise InvalidAdapter(
                f"{name!r:.300} is no name for an adapter: letters, digits and . : @ / + - _ are.", param="lora_name"
            )
        before = self._infos.get(name)
        if before is not None and (before.owner != owner or not replace):
            raise AdapterExists(f"The adapter `{name}` has already been loaded.")
        if name in self._busy:
            raise _busy(name)
        command = LoadAdapter(next(self._command_ids), name, folder, within, replace)
        self._busy[name] = asyncio.Event()
        # A caller that goes away does not leave the engine with an adapter that is not in the record.
        return await self._loads.run(self._load(send, command, owner))

    async def unload(self, send: Send, name: str, *, owner: str | None = None) -> None:
        """The name is gone at once, or when it has been loaded; its open requests finish. `owner`: whose it has to be.
        Raises ModelNotFound."""
        await self._settled(name)
        info = self._infos.get(name)
        if info is None or owner not in (None, info.owner):
            raise ModelNotFound(f"The adapter `{name}` does not exist.")
        del self._infos[name]
        try:
            await self._ask(send, UnloadAdapter(next(self._command_ids), name))
        except EngineUnavailable:
            logger.info("adapter %s was unloaded with its engine", name)

    async def restore(self, send: Send) -> None:
        """Loads everything into an engine that has nothing. Raises EngineUnavailable when that one has gone, too."""
        restored: set[str] = set()
        for info in self.infos():
            await self._settled(info.name)
            if info.name not in self._infos:  # unloaded in the meantime
                continue
            command = LoadAdapter(next(self._command_ids), info.name, info.folder, info.within, True)
            self._busy[info.name] = asyncio.Event()
            try:
                await self._load(send, command, info.owner)
            except EngineUnavailable:
                raise
            except LongwaveError as error:
                logger.error("adapter %s is not served any more: %s", info.name, error.message)
                self._infos.pop(info.name, None)
            else:
                restored.add(info.name)
        while gone := restored - self._infos.keys():  # unloaded since, while this engine took no commands yet
            restored -= gone
            for name in gone:
                await self._ask(send, UnloadAdapter(next(self._command_ids), name))

    def on_reply(self, reply: CommandReply) -> None:
        future = self._replies.pop(reply.command_id, None)
        if future is not None and not future.done():
            future.set_result(reply)

    def lose(self) -> None:
        """The engine has gone: nobody will answer."""
        replies, self._replies = self._replies, {}
        for future in replies.values():
            if not future.done():
                future.set_exception(EngineUnavailable("The engine stopped while it loaded an adapter."))

    async def _settled(self, name: str) -> None:
        while (busy := self._busy.get(name)) is not None:
            await busy.wait()

    async def _load(self, send: Send, command: LoadAdapter, owner: str) -> AdapterInfo:
        """The caller has marked the name as busy."""
        try:
            reply = await self._ask(send, command)
        finally:
            self._busy.pop(command.name).set()
        assert isinstance(reply, AdapterLoaded)
        facts = reply.facts
        info = self._infos[command.name] = AdapterInfo(
            name=command.name,
            folder=command.folder,
            owner=owner,
            within=command.within,
            digest=facts.digest,
            rank=facts.rank,
            num_layers=facts.num_layers,
            base_model=facts.base_model,
            created=facts.written,
        )
        return info

    async def _ask(self, send: Send, command: LoadAdapter | UnloadAdapter) -> AdapterLoaded | AdapterUnloaded:
        future: asyncio.Future[CommandReply] = asyncio.get_running_loop().create_future()
        self._replies[command.command_id] = future
        try:
            send(command)
            reply = await future
        finally:
            self._replies.pop(command.command_id, None)
        if isinstance(reply, CommandFailed):
            raise from_code(reply.code, reply.message)
        return reply


def _busy(name: str) -> AdapterExists:
    error = AdapterExists(f"The adapter `{name}` is being loaded.")
    error.is_final = False  # it may fail, or be what another load takes the place of
    return error
