"""One life of the engine process as the API process sees it: spawn, sockets, the moment it ends. Knows no requests."""

import asyncio
import contextlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from server.child_process import spawn
from server.engine.config import EngineConfig
from server.engine.link import FROM_ENGINE, TO_ENGINE, decode_from_engine, encode
from server.engine.messages import FromEngine, ToEngine
from server.engine.worker import WorkerArguments
from server.errors import EngineUnavailable

REAP_INTERVAL = 0.01  # seconds between looks at a process that has closed its files and is about to end
REST_LIMIT = 5.0  # seconds for what an engine sent before it ended; milliseconds in practice
MAX_FRAME_BYTES = 1 << 30


class EngineProcess:
    """Call from the event loop's thread: the engine ends when the thread that started it does."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises EngineUnavailable when no process or no sockets can be had."""
        try:
            self.directory = Path(tempfile.mkdtemp(prefix="longwave-"))  # mode 0700
        except OSError as error:
            raise EngineUnavailable(f"The engine's sockets need a folder: {error}.") from error
        self._opened = contextlib.ExitStack()  # what is to be closed
        self._opened.callback(self.remove_directory)
        self.ended = asyncio.Event()
        self._connections = 0  # to the inbox, so far as the monitor's events were read
        self._loop = asyncio.get_running_loop()
        try:
            self._open_sockets()
            self._bind(self._outbox, TO_ENGINE)
            self._bind(self._inbox, FROM_ENGINE)
            # The child holds the only write end: end-of-file says that it is gone, however it went.
            self._sentinel, childs_end = os.pipe()
            try:
                self.process = self._spawn(config, childs_end)
            except OSError:
                os.close(self._sentinel)
                raise
            finally:
                os.close(childs_end)
        except (OSError, zmq.ZMQError) as error:
            self._opened.close()
            raise EngineUnavailable(f"The engine's process cannot be started: {error}.") from error
        self._loop.add_reader(self._sentinel, self._on_end)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def manner_of_end(self) -> str:
        """After close(). Signal 9 that nobody has sent is mostly the kernel's, for want of memory."""
        code = self.process.returncode
        return f"with status {code}" if code >= 0 else f"by signal {-code}"

    def send(self, message: ToEngine) -> None:
        """Never waits: the queue is as long as admission allows. Raises EngineUnavailable when nobody is there."""
        if self.ended.is_set():
            raise EngineUnavailable("The engine is not running.")
        try:
            self._outbox.send(encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise EngineUnavailable("The engine can not be reached.") from error

    async def receive(self, timeout: float | None = None) -> list[FromEngine]:
        """One frame's messages; empty after `timeout` seconds without any. Cancelling it loses nothing."""
        milliseconds = None if timeout is None else int(timeout * 1000)
        if not await self._inbox.poll(milliseconds):
            return []
        return decode_from_engine(await self._inbox.recv(zmq.NOBLOCK))

    async def rest(self) -> AsyncIterator[list[FromEngine]]:
        """After the end: what had been sent and was not received. The last bytes may still be on their way when the
        process is gone, so this ends where its connection does."""
        deadline = self._loop.time() + REST_LIMIT
        while self._loop.time() < deadline:
            connected = self._is_connected()  # before the look for messages: all of them come before the end
            if messages := await self.receive(REAP_INTERVAL if connected else 0.0):
                yield messages
            elif not connected:
                return

    def remove_directory(self) -> None:
        """Once both sides are connected the names are not needed: nothing stays behind, even after kill -9."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    async def close(self) -> None:
        """Kills what still runs, waits for its end, frees everything."""
        self.kill()
        await self.ended.wait()
        while self.process.poll() is None:
            await asyncio.sleep(REAP_INTERVAL)
        self._opened.close()

    def _spawn(self, config: EngineConfig, childs_end: int) -> subprocess.Popen[bytes]:
        level = logging.getLogger().getEffectiveLevel()
        arguments = WorkerArguments(config, str(self.directory), os.getpid(), level, time.monotonic())
        return spawn(
            "server.engine.worker",
            [msgspec.json.encode(arguments).decode()],
            cache_dir=config.cache_dir,
            files=(childs_end,),
            process_group=0,  # Ctrl-C in a terminal is the API process's alone: it says when the engine is to end
        )

    def _open_sockets(self) -> None:
        context = zmq.Context(io_threads=1)
        self._opened.callback(context.term)  # waits for sockets that are open
        self._outbox = context.socket(zmq.PUSH)
        self._opened.callback(self._outbox.close, 0)
        self._inbox: Any = zmq.asyncio.Socket(context, zmq.PULL)  # Any: its stubs are those of the blocking one
        self._opened.callback(self._inbox.close, 0)
        self._monitor: Any = self._inbox.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._opened.callback(self._monitor.close, 0)
        self._opened.callback(self._inbox.disable_monitor)

    def _bind(self, socket: Any, name: str) -> None:
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        path = self.directory / name
        socket.bind(f"ipc://{path}")
        path.chmod(0o600)

    def _is_connected(self) -> bool:
        while self._monitor.poll(0):
            accepted = recv_monitor_message(self._monitor)["event"] == zmq.EVENT_ACCEPTED
            self._connections += 1 if accepted else -1
        return self._connections > 0

    def _on_end(self) -> None:
        self._loop.remove_reader(self._sentinel)
        os.close(self._sentinel)
        self.ended.set()
