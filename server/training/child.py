"""The training process as the API process sees it: spawn, commands with replies, the moment it ends. Knows no owners
and no order of calls. On the event loop."""

import asyncio
import contextlib
import logging
import socket
import subprocess
import time
from itertools import count
from typing import Any

from server.child_process import spawn_trainer
from server.frames import HEADER, body_size, frame
from server.signals import signal_name
from server.training.messages import (
    MAX_FRAME_BYTES,
    Arguments,
    Command,
    Done,
    Failed,
    FailureKind,
    FromWorker,
    Ready,
    Unable,
    Work,
    from_worker,
)

logger = logging.getLogger("longwave")

REAP_INTERVAL = 0.01  # seconds between looks at a process that is about to end
END_SECONDS = 5.0  # that a process has which says no more, then it is killed


class ChildEndedError(Exception):
    """The process has ended; the message says how: a sentence without a full stop."""


class WorkFailedError(Exception):
    """The process could not do this; it goes on."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Child:
    """Use `Child.start` from the event loop's thread: the process ends when that thread does."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        silence_limit: float,
        call_seconds: float,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()
        self._process = process
        self._reader = reader
        self._writer = writer
        self._silence_limit = silence_limit
        self._call_seconds = call_seconds
        self._replies: dict[int, asyncio.Future[Done]] = {}  # of commands without an answer, in their order
        self._limit: asyncio.TimerHandle | None = None  # of the first of them
        self._command_ids = count(1)
        self._reason: str | None = None  # why it was killed, when we did it
        self._reading = asyncio.create_task(self._read(), name="training-reader")

    @classmethod
    async def start(cls, arguments: Arguments, worker: str, *, silence_limit: float, call_seconds: float) -> "Child":
        """Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        process = None
        try:
            with theirs:
                process = spawn_trainer(worker, arguments, theirs)
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            if process is not None:
                process.kill()
                process.wait()
            raise
        return cls(process, reader, writer, silence_limit=silence_limit, call_seconds=call_seconds)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, model_id: str, work: Work) -> Done:
        """Commands are carried out one at a time, in their order, but for saves `beside` them. Raises WorkFailedError,
        ChildEndedError."""
        if self.ended.done():
            raise ChildEndedError(self.ended.result())
        command_id = next(self._command_ids)
        self._writer.write(frame(Command(command_id, model_id, work)))
        reply = self._replies[command_id] = asyncio.get_running_loop().create_future()
        if len(self._replies) == 1:
            self._watch()
        return await reply

    async def close(self) -> None:
        """Ends it, and returns when it is gone."""
        self._kill("The training process was ended")
        await asyncio.wait([self._reading])

    def _watch(self) -> None:
        """The process has begun with the first command that has no answer, if there is one."""
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
        if self._replies:
            reason = f"The training process did not finish a call within {self._call_seconds:.0f} s"
            self._limit = asyncio.get_running_loop().call_later(self._call_seconds, self._kill, reason)

    def _kill(self, reason: str) -> None:
        self._reason = self._reason or reason
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def _read(self) -> None:
        try:
            while True:
                try:
                    async with asyncio.timeout(self._silence_limit):
                        message = await self._receive()
                except TimeoutError:
                    self._kill("The training process did not answer any more")
                    break
                if message is None:
                    break
                self._take(message)
        except asyncio.IncompleteReadError as error:  # how it ended says more, and is told
            logger.error("the training process was not understood: it stopped in the middle of a message: %s", error)
        except Exception:
            logger.exception("the training process was not understood")  # there is no way on from there
            self._kill("The training process sent a message that cannot be read")
        finally:
            await self._bury()

    async def _receive(self) -> FromWorker | None:
        """None at the end of the stream. Raises IncompleteReadError where that is in the middle of a message, and we
        have not ended it, and whatever makes a message unreadable."""
        header = b""
        try:
            header = await self._reader.readexactly(HEADER.size)
            return from_worker(await self._reader.readexactly(body_size(header, MAX_FRAME_BYTES)))
        except asyncio.IncompleteReadError as error:
            if self._reason is None and (header or error.partial):
                raise
            return None
        except ConnectionError:
            return None

    def _take(self, message: FromWorker) -> None:
        match message:
            case Ready():
                self.ready.set_result(message)
            case Unable(message=text):
                self._reason = text
            case Done(command_id=command_id):
                reply = self._answered(command_id)
                if reply is not None:
                    reply.set_result(message)
            case Failed(command_id=command_id, kind=kind, message=text):
                reply = self._answered(command_id)
                if reply is not None:
                    reply.set_exception(WorkFailedError(kind, text))

    def _answered(self, command_id: int) -> "asyncio.Future[Done] | None":
        """None when nobody waits for the answer any more."""
        was_first = command_id == next(iter(self._replies), None)
        reply = self._replies.pop(command_id, None)
        if reply is None:
            return None
        if was_first:  # else it was a save beside the first, whose time goes on
            self._watch()
        return None if reply.done() else reply

    async def _bury(self) -> None:
        """Waits for the end of the process; then everybody who waits for a word of it is told how it came."""
        self._writer.close()  # the process, if it still lives, sees the end of the file
        deadline = time.monotonic() + END_SECONDS
        while (status := self._process.poll()) is None:
            if time.monotonic() > deadline:
                self._kill("The training process closed its connection and did not end")
            await asyncio.sleep(REAP_INTERVAL)
        if self._limit is not None:
            self._limit.cancel()
        reason = self._reason or _ended(status)
        self.ended.set_result(reason)
        everybody: list[asyncio.Future[Any]] = [self.ready, *self._replies.values()]
        for waiting in everybody:
            if not waiting.done():
                waiting.set_exception(ChildEndedError(reason))
                waiting.exception()  # seen, even if nobody waits for it


def _ended(status: int) -> str:
    if status >= 0:
        return f"The training process ended without a word (exit status {status})"
    name = signal_name(-status)
    return f"The training process was killed ({name}{': too little memory, perhaps' if name == 'SIGKILL' else ''})"
