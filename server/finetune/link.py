"""The trainer process's end of its socket: what it says, and what it is told. Must not know what is trained."""

import logging
import os
import socket
import threading
from typing import NoReturn

from server.finetune.messages import MAX_FRAME_BYTES, Beat, FromTrainer, Recorded, Stepped, Stop, to_trainer
from server.frames import HEADER, body_size, frame

logger = logging.getLogger("server.finetune.link")

BEAT_SECONDS = 1.0
UNRECORDED_STEPS = 1  # steps that may be trained before the step before them is known to be recorded


class TrainerLink:
    """Beats from the start. The process ends (at once: nothing is left half done that matters) when its peer does."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._sending = threading.Lock()
        self._told = threading.Condition()
        self._unrecorded = 0
        self._stop = False
        self._closed = threading.Event()
        for work, name in ((self._listen, "listener"), (self._beat, "beat")):
            threading.Thread(target=work, name=name, daemon=True).start()

    def send(self, message: FromTrainer) -> None:
        with self._sending:
            self._socket.sendall(frame(message))

    def step(self, message: Stepped) -> bool:
        """Waits until the step before it is recorded. Whether to stop now."""
        with self._told:
            self._unrecorded += 1
        self.send(message)
        with self._told:
            self._told.wait_for(lambda: self._unrecorded <= UNRECORDED_STEPS)
            return self._stop

    @property
    def stopping(self) -> bool:
        """Whether the end was asked for."""
        return self._stop

    def close(self) -> None:
        """What was sent stays readable for the peer."""
        self._closed.set()
        with self._sending:
            self._socket.shutdown(socket.SHUT_WR)

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                message = self._receive()
            except Exception:  # without this thread the trainer would wait for ever, and beat
                logger.critical("the API process was not understood", exc_info=True)
                _end()
            with self._told:
                match message:
                    case Recorded():
                        self._unrecorded -= 1
                    case Stop():
                        self._stop = True
                self._told.notify_all()

    def _receive(self) -> Recorded | Stop:
        header = self._read(HEADER.size)
        return to_trainer(self._read(body_size(header, MAX_FRAME_BYTES)))

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            try:
                piece = self._socket.recv(size - len(data))
            except OSError:
                piece = b""
            if not piece:
                if not self._closed.is_set():
                    logger.warning("the API process is gone")
                _end()
            data += piece
        return data

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            try:
                self.send(Beat())
            except OSError:  # the listener sees it, too
                return


def _end() -> NoReturn:
    """Of this process, once its log is written."""
    logging.shutdown()
    os._exit(1)
