"""One trainer process as the API process sees it: spawn, messages, the moment it ends. Knows no jobs and no SQL.

A socket pair, and not the engine's named sockets: there is one peer, nothing on the disk, and end-of-file says both
that the process is gone and that all it sent was read.
"""

import asyncio
import contextlib
import socket
import subprocess

import msgspec

from server.child_process import spawn_trainer
from server.finetune.messages import MAX_FRAME_BYTES, Arguments, FromTrainer, ToTrainer, from_trainer
from server.frames import HEADER, body_size, frame

REAP_INTERVAL = 0.01  # seconds between looks at a process that has closed its files and is about to end


class UnreadableError(Exception):
    """What the trainer sent is no message; the text says why, and nothing of the data."""


class TrainerProcess:
    """Use `TrainerProcess.start` from the event loop's thread: the trainer ends when that thread does."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._killed = False  # by us

    @classmethod
    async def start(cls, arguments: Arguments, worker: str) -> "TrainerProcess":
        """Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        process = None
        try:
            with theirs:
                process = spawn_trainer(worker, arguments, theirs)
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:  # cancelled, too
            ours.close()
            if process is not None:
                process.kill()
                process.wait()
            raise
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def receive(self) -> FromTrainer | None:
        """The next message; None when there will be none. Raises UnreadableError: there is no way on from there."""
        header = b""
        try:
            header = await self._reader.readexactly(HEADER.size)
            return from_trainer(await self._reader.readexactly(body_size(header, MAX_FRAME_BYTES)))
        except asyncio.IncompleteReadError as error:
            if self._killed or not (header or error.partial):
                return None
            part = "message" if header else "message's length"
            raise UnreadableError(
                f"it ended after {len(error.partial)} of the {error.expected} bytes of a {part}"
            ) from error
        except ConnectionError:
            return None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UnreadableError(f"its message cannot be decoded: {error}") from error

    def send(self, message: ToTrainer) -> None:
        """Never waits, and nothing happens when nobody is there any more: messages are few and small."""
        if not self._writer.is_closing():
            self._writer.write(frame(message))

    def kill(self) -> None:
        self._killed = True
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> int:
        """Kills what still runs, waits for its end, frees everything. The exit status, negative for a signal."""
        self.kill()
        while (status := self._process.poll()) is None:
            await asyncio.sleep(REAP_INTERVAL)
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
        return status

    async def wait(self) -> int:
        """Its exit status, negative for a signal; after `receive` has returned None this takes a moment only."""
        while (status := self._process.poll()) is None:
            await asyncio.sleep(REAP_INTERVAL)
        return status
