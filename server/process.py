"""The server's process: one socket, uvicorn, and signals that drain before they end it. Must not know routes."""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import uvicorn

from server.connections import BACKLOG, HEADER_BYTES, ImpatientProtocol, connection_limits, raise_file_limit
from server.errors import EngineUnavailable
from server.lifecycle import Lifecycle, Phase
from server.settings import Settings

logger = logging.getLogger("longwave")

KEEP_ALIVE = 75  # seconds an idle connection is kept
CLOSE_GRACE = 5  # seconds uvicorn waits for handlers after the drain
LOOK_SECONDS = 0.05  # between two looks at replies that clients still read
EXIT_FAILED = 1
EXIT_GIVEN_UP = 4  # the engine, after it had served; 2 and 3 are a wrong flag's and a wrong setting's
#: Of garbage collections, fewer than Python's (700, 10, 10): hardly any finds something, and each stops all answers.
GC_THRESHOLDS = (10_000, 10, 10)
_STAT = Path("/proc/self/stat")


def began() -> float:
    """When this process did, on time.monotonic()'s clock; now, where the system does not say."""
    if not _STAT.is_file():
        return time.monotonic()
    ticks = int(_STAT.read_text().rpartition(")")[2].split()[19])  # proc(5): starttime, after the boot
    boot = time.monotonic() - time.clock_gettime(time.CLOCK_BOOTTIME)  # read side by side: this process may be held up
    return boot + ticks / os.sysconf("SC_CLK_TCK")


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: ours drain first. However few connections are accepted in one turn, as many
    as ever may wait for theirs."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)

    async def answered(self) -> None:
        """Returns when every request that has come by now has all of its reply, or nobody waits for that any more.
        Those that come meanwhile are not waited for: there might be no end of them."""
        open_ones = self._exchanges()
        while any(now is open_ones.get(connection) for connection, now in self._exchanges().items()):
            await asyncio.sleep(LOOK_SECONDS)

    def _exchanges(self) -> dict[Any, object]:
        """By connection."""
        connections: set[Any] = self.server_state.connections  # whose class is of the configuration
        return {one: one.exchange for one in connections if one.exchange is not None}

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def end(code: int) -> NoReturn:
    """Of this process, at once: threads that still import or tokenise have nothing to tidy."""
    logging.shutdown()
    os._exit(code)


def listen(host: str, port: int) -> socket.socket:
    """Before anything is loaded, so that a taken port is known at once. Listens, too: two processes may bind one port
    as long as neither does. Who connects before uvicorn is there waits for it. Raises OSError.

    The protocol is named: asyncio turns Nagle's algorithm off for such sockets only, with which the second write of a
    reply waits 40 ms for the client's acknowledgement of the first."""
    host = host.removeprefix("[").removesuffix("]")  # an IPv6 address may come as in a URL
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def uvicorn_config(app: Any, settings: Settings) -> uvicorn.Config:
    most, backlog = connection_limits()
    return uvicorn.Config(
        app,
        http=type("Protocol", (ImpatientProtocol,), {"header_timeout": settings.header_timeout, "most": most}),
        backlog=backlog,
        h11_max_incomplete_event_size=HEADER_BYTES,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=CLOSE_GRACE,
    )


def serve(
    make_app: Callable[[], Any], lifecycle: Lifecycle, listener: socket.socket, on_ready: Callable[[], None]
) -> int:
    """Runs until a signal or a failed start; returns the process's exit code."""
    raise_file_limit()
    gc.set_threshold(*GC_THRESHOLDS)
    return asyncio.run(_serve(make_app, lifecycle, listener, on_ready))


async def _serve(
    make_app: Callable[[], Any], lifecycle: Lifecycle, listener: socket.socket, on_ready: Callable[[], None]
) -> int:
    ending = _Ending(lifecycle)  # first: what is begun below has to be ended
    try:
        await lifecycle.start_engine()  # before all that is imported for the application: the engine takes longest
        server = Server(uvicorn_config(make_app(), lifecycle.settings))
        lifecycle.drains.append(server.answered)
        ending.take(server)
        watching = asyncio.create_task(_watch(server, lifecycle, ending, on_ready))
        try:
            await server.serve(sockets=[listener])
        finally:
            watching.cancel()
    except EngineUnavailable as error:
        logger.critical("cannot serve: %s", error.message)
        return EXIT_FAILED
    finally:
        await ending.finish()
        await lifecycle.engine.shutdown(0.0)  # after a forced exit uvicorn leaves that to us
    return EXIT_FAILED if lifecycle.phase is Phase.FAILED or not server.started else ending.exit_code


async def _watch(server: Server, lifecycle: Lifecycle, ending: "_Ending", on_ready: Callable[[], None]) -> None:
    phase = await lifecycle.wait_until(Phase.SERVING, Phase.FAILED, Phase.DRAINING)
    if phase is Phase.FAILED:
        server.should_exit = True
    if phase is not Phase.SERVING:
        return
    gc.freeze()  # or a full collection looks at all that was imported: a fifth of a second, amid the first requests
    threading.Thread(target=_tell, args=(on_ready,), name="announcement", daemon=True).start()
    if not lifecycle.settings.keep_alive_on_engine_death:
        await lifecycle.engine.gone()
        ending.give_up()


def _tell(on_ready: Callable[[], None]) -> None:
    """In a thread: whoever was to read it may have gone, or stand still."""
    with contextlib.suppress(OSError):
        on_ready()


class _Ending:
    """The first SIGTERM or SIGINT drains, the second cuts what still runs, the third waits for nothing. SIGHUP, which
    comes more than once when a terminal goes, drains only, and does nothing under nohup."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.exit_code = 0
        self._server: Server | None = None  # until there is an application to serve
        self._is_over = self._at_once = False
        self._lifecycle = lifecycle
        self._draining: asyncio.Task[None] | None = None
        self._cutting: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        self._signals = {signal.SIGTERM: self._on_signal, signal.SIGINT: self._on_signal}
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            self._signals[signal.SIGHUP] = self._drain
        for number, act in self._signals.items():
            loop.add_signal_handler(number, act)

    def _drain(self) -> None:
        if self._draining is None:
            self._draining = asyncio.create_task(self._then_end(self._lifecycle.drain))

    def _on_signal(self) -> None:
        if self._draining is None:
            self._drain()
        elif self._cutting is None:
            self._draining.cancel()
            self._cutting = asyncio.create_task(self._then_end(self._lifecycle.cut))
        else:
            self._at_once = True
            self._end()

    def give_up(self) -> None:
        """As a first signal does, unless one has come: training is to reach its checkpoints."""
        if self._draining is None:
            logger.critical("the engine stays down, so this process ends with %d", EXIT_GIVEN_UP)
            self.exit_code = EXIT_GIVEN_UP
            self._drain()

    async def _then_end(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception:
            logger.exception("shutting down failed: ending now")
        finally:
            self._end()

    def take(self, server: Server) -> None:
        """What there is to end; the signal may have come before it."""
        self._server = server
        if self._is_over:
            self._end()

    def _end(self) -> None:
        self._is_over = True
        if self._server is not None:
            self._server.should_exit, self._server.force_exit = True, self._at_once

    async def finish(self) -> None:
        loop = asyncio.get_running_loop()
        for number in self._signals:
            loop.remove_signal_handler(number)
        for task in filter(None, (self._draining, self._cutting)):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
