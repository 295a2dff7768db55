"""The API process's side of the engine: one stream per request over whichever engine process lives now. Knows token ids
and failures, no text, no HTTP. All of it runs on one event loop."""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial

from server.engine.adapter_registry import AdapterInfo, AdapterRegistry
from server.engine.config import EngineConfig
from server.engine.deaths import DEATH_WINDOW, MAX_DEATHS, Deaths
from server.engine.lives import Lives
from server.engine.messages import (
    AbortRequests,
    AdapterLoaded,
    AdapterUnloaded,
    AddRequest,
    CommandFailed,
    EngineFailed,
    EngineLoading,
    EngineReady,
    EngineStats,
    FromEngine,
    RequestFailed,
    RequestTimes,
    Shutdown,
    ToEngine,
    TokenDelta,
)
from server.engine.open_streams import OpenStreams
from server.engine.process import EngineProcess
from server.engine.reading import read_to_the_end
from server.engine.silence import MAX_SILENCE
from server.engine.starts import LEAST_START, Starts
from server.error_codes import from_code
from server.errors import EngineUnavailable, retry_after_in

logger = logging.getLogger(__name__)

ENDED = "the engine process ended"  # when it did not say why
STATS_DELAY = 1.0  # seconds after a message was sent until which statistics may not know of it yet
END_GRACE = 5.0  # seconds an engine that reported its own failure may take to end
ROOM_SECONDS = 5.0  # until there may be room again for a process or its sockets
TELL_SECONDS = 60.0  # between two lines in the log about a start that lasts


class EngineClient:
    """Starts the engine, restarts it when it dies, and gives every request its own stream of TokenDeltas."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        times: Callable[[RequestTimes], None] | None = None,
        max_deaths: int = MAX_DEATHS,
        death_window: float = DEATH_WINDOW,
        max_silence: float = MAX_SILENCE,
        least_start: float = LEAST_START,
    ) -> None:
        self.config = config
        self.times = times
        self.stats: EngineStats | None = None  # counters are of all engines so far
        self._lives = Lives()
        self._engine: EngineProcess | None = None
        self._ready: asyncio.Future[EngineReady] | None = None  # of this life, or of the next while there is one
        self._streams = OpenStreams()
        self._adapters = AdapterRegistry()
        self._restoring: asyncio.Task[None] | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._last_message = 0.0
        self._last_sent = 0.0  # what the engine has to work for
        self._last_stats = 0.0
        self._was_ready = False
        self._starts = Starts(least_start)
        self._stopping = False
        self._failure = ENDED
        self._deaths = Deaths(max_deaths, death_window)
        self._max_silence = max_silence

    async def start(self) -> None:
        """Spawns the engine process; its sockets are bound when this returns, its model is not loaded. Raises
        EngineUnavailable."""
        self._ready = asyncio.get_running_loop().create_future()
        self._begin()
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")

    async def ready(self) -> EngineReady:
        """Waits until the engine (or its successor) serves. Raises EngineUnavailable when it never will."""
        if self._ready is None:
            raise EngineUnavailable("The engine was not started.")
        return await asyncio.shield(self._ready)

    async def gone(self) -> None:
        """Returns when `alive` is false, which it then stays."""
        if self._supervisor is not None:
            await asyncio.wait((self._supervisor,))

    @property
    def is_ready(self) -> bool:
        return self._ready is not None and self._ready.done() and self._ready.exception() is None

    @property
    def seconds_to_ready(self) -> float:
        """Until an engine that restarts is expected to be ready, if that takes as long as the last time."""
        return 0.0 if self.is_ready else self._starts.seconds_left

    @property
    def alive(self) -> bool:
        """False before start(), after shutdown() and when the engine died too often to be started again."""
        return self._supervisor is not None and not self._supervisor.done()

    @property
    def heartbeat_age(self) -> float:
        """Seconds since the engine was last heard of; 0 while it loads."""
        return time.monotonic() - self._last_message if self.is_ready else 0.0

    @property
    def is_idle(self) -> bool:
        """Whether the engine is known to have nothing to do: it says so once a second then, however long its steps
        are."""
        stats = self.stats
        return (
            not self._streams
            and stats is not None
            and stats.num_running == stats.num_waiting == 0
            and self._last_stats > self._last_sent + STATS_DELAY
        )

    @property
    def pid(self) -> int | None:
        return None if self._engine is None else self._engine.pid

    @property
    def num_deaths(self) -> int:
        return self._deaths.num

    @property
    def num_open(self) -> int:
        return len(self._streams)

    def generate(self, request: AddRequest) -> AsyncGenerator[TokenDelta, None]:
        """The request's deltas; the last one has a finish_reason. Closing the iterator early aborts the request in
        the engine, before the first token too. Raises the LongwaveError that ended it otherwise."""
        return self._streams.read(request.request_id, lambda: self._send(request), self.abort)

    async def load_adapter(
        self, name: str, folder: str, *, owner: str = "", within: str | None = None, replace: bool = False
    ) -> AdapterInfo:
        """Requests may name it from now on, and every engine to come will have it. `owner`: who may, for whoever asks.
        Raises InvalidAdapter, AdapterExists, QuotaExceeded, EngineUnavailable."""
        return await self._adapters.load(self._send, name, folder, owner=owner, within=within, replace=replace)

    async def unload_adapter(self, name: str, *, owner: str | None = None) -> None:
        """New requests find it no more, open ones finish; one that is being loaded goes then. `owner`: whose it has to
        be; anybody's, by default. Raises ModelNotFound."""
        await self._adapters.unload(self._send, name, owner=owner)

    def adapters(self) -> tuple[AdapterInfo, ...]:
        """Those that were loaded, oldest first; also while the engine restarts."""
        return self._adapters.infos()

    def abort(self, request_id: str) -> None:
        """An open stream of that name ends with finish_reason "abort". Unknown names are ignored."""
        if self._engine is not None and self.is_ready:
            with contextlib.suppress(EngineUnavailable):  # then there is nothing to abort
                self._engine.send(AbortRequests([request_id]))

    async def shutdown(self, timeout: float = 0.0) -> None:
        """Lets open requests finish for `timeout` seconds, then ends the engine. No new ones from now on."""
        self._stopping = True
        engine, supervisor = self._engine, self._supervisor
        if supervisor is None:
            return
        if engine is not None and self.is_ready:
            with contextlib.suppress(EngineUnavailable, TimeoutError):
                engine.send(Shutdown())
                async with asyncio.timeout(timeout):
                    await engine.ended.wait()
        if engine is not None:
            engine.kill()
        await supervisor

    def _send(self, message: ToEngine) -> None:
        if not self.is_ready or self._stopping or self._engine is None:
            raise EngineUnavailable("The engine is not ready.", retry_after=retry_after_in(self.seconds_to_ready))
        self._engine.send(message)
        self._last_sent = time.monotonic()

    def _begin(self) -> None:
        """A life. Raises EngineUnavailable."""
        self._starts.begin()
        self._last_message = time.monotonic()
        self._engine = EngineProcess(self.config)

    async def _begin_again(self) -> None:
        """Where there is no room for one (processes, a full disk), that is a death, too. Raises EngineUnavailable."""
        while True:
            try:
                return self._begin()
            except EngineUnavailable as error:
                if not self._may_restart():
                    raise
                logger.error("%s It is tried again in %.0f s.", error.message, ROOM_SECONDS)
            await asyncio.sleep(ROOM_SECONDS)
            if self._stopping:
                raise EngineUnavailable("The server is ending.")

    async def _supervise(self) -> None:
        """Life after life, until told to stop or until there were too many deaths."""
        try:
            while self._engine is not None:
                await self._live(self._engine)
                if not self._may_restart():
                    return
                logger.error("engine ended (%s); starting it again", self._failure)
                self._failure = ENDED
                await self._begin_again()
        except EngineUnavailable as error:
            self._failure = error.message.rstrip(".")
            logger.critical("the engine stays down: %s", self._failure)
        except Exception:
            logger.critical("the engine's supervisor failed", exc_info=True)
        finally:
            self._engine = None
            self._lose()
            if self._ready is not None and not self._ready.done():
                self._ready.set_exception(EngineUnavailable(f"The engine is not running: {self._failure}."))
                self._ready.exception()  # seen, even if nobody waits for it

    async def _live(self, engine: EngineProcess) -> None:
        """One engine from its first message to its last; everything of it is gone when this returns."""
        limits = {self._last_word: self._max_silence, self._last_word_of_start: self._starts.max_silence}
        telling = asyncio.create_task(self._tell_of_start(), name="engine-start-told")
        try:
            exceeded = await read_to_the_end(engine, partial(self._dispatch, engine), limits)
            if exceeded is not None:
                self._failure = f"it said nothing for {exceeded:.0f} s"
        finally:
            telling.cancel()
            self._lose()
            await engine.close()
            if self._failure == ENDED:
                self._failure = f"{ENDED} {engine.manner_of_end}"

    def _last_word(self) -> float | None:
        return self._last_message if self.is_ready and not self._stopping else None

    def _last_word_of_start(self) -> float | None:
        return None if self.is_ready or self._stopping else self._last_message

    async def _tell_of_start(self) -> None:
        """While it lasts: nothing ends a first one, so somebody has to see that it hangs."""
        while True:
            await asyncio.sleep(TELL_SECONDS)
            if self.is_ready:
                return
            logger.info("the engine is still loading: %s", self._starts)

    def _dispatch(self, engine: EngineProcess, messages: list[FromEngine]) -> None:
        self._last_message = time.monotonic()
        for message in messages:
            match message:
                case TokenDelta():
                    self._streams.put(message)
                case RequestTimes():
                    if self.times is not None:
                        self.times(message)
                case EngineStats():
                    self.stats = self._lives.report(message)
                    self._last_stats = self._last_message
                case RequestFailed(request_id=request_id, code=code, message=text):
                    self._streams.fail(request_id, from_code(code, text))
                case EngineLoading(stages=stages):
                    self._starts.stages = stages
                case EngineReady(num_blocks=num_blocks):
                    engine.remove_directory()
                    # Trainers outlive it and hold memory: the next one would measure a smaller pool, or none.
                    self.config = dataclasses.replace(self.config, num_gpu_blocks_override=num_blocks)
                    self._was_ready = True
                    self._restoring = asyncio.create_task(self._restore(engine, message), name="adapters-restored")
                case AdapterLoaded() | AdapterUnloaded() | CommandFailed():
                    self._adapters.on_reply(message)
                case EngineFailed(message=text):
                    self._failure = text
                    self._lose()
                    asyncio.get_running_loop().call_later(END_GRACE, engine.kill)

    async def _restore(self, engine: EngineProcess, message: EngineReady) -> None:
        """An engine is ready when it has all the adapters that the one before it had: no request is to miss one."""
        try:
            await self._adapters.restore(engine.send)
        except EngineUnavailable:
            return  # it ended before it was ready
        if self._ready is not None and not self._ready.done():
            self._starts.end()
            self._deaths.recover()
            self._ready.set_result(message)

    def _lose(self) -> None:
        """From now on nobody is ready, until a next engine says so; what was open has failed."""
        if self.is_ready:
            self._ready = asyncio.get_running_loop().create_future()
            self._starts.begin()
        self.stats = self._lives.end()
        if self._restoring is not None:
            self._restoring.cancel()
        self._adapters.lose()
        message, seconds = "The engine stopped while it ran this request.", self.seconds_to_ready
        self._streams.fail_all(lambda: EngineUnavailable(message, retry_after=retry_after_in(seconds)))

    def _may_restart(self) -> bool:
        """An engine that never came up will not come up the next time; one that served may."""
        if self._stopping:
            return False
        too_many = self._deaths.add(time.monotonic())
        if not self._was_ready:
            return False  # `ready` raises, and whoever waits for it says why
        if too_many:
            logger.critical("the engine ended %s and stays down", self._deaths)
            return False
        return True
