"""The training process's end of its socket: commands in, replies and beats out. Must not know what is trained."""

import contextlib
import socket
import threading

from server.frames import HEADER, body_size, frame
from server.training.messages import MAX_FRAME_BYTES, Beat, Command, FromWorker, command

BEAT_SECONDS = 1.0


class WorkerLink:
    """Beats from the start."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._sending = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def receive(self) -> Command | None:
        """The next command, as long as it takes; None when the API process is gone."""
        header = self._read(HEADER.size)
        body = None if header is None else self._read(body_size(header, MAX_FRAME_BYTES))
        return None if body is None else command(body)

    def send(self, message: FromWorker) -> None:
        """Raises OSError when the API process is gone."""
        data = frame(message)
        with self._sending:
            self._socket.sendall(data)

    def close(self) -> None:
        """What was sent stays readable for the peer."""
        self._closed.set()
        with self._sending, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def _read(self, size: int) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            try:
                piece = self._socket.recv(min(size - len(data), 2**20))
            except ConnectionError:
                return None
            if not piece:
                return None
            data += piece
        return bytes(data)

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            try:
                self.send(Beat())
            except OSError:  # the next receive() sees it, too
                return
