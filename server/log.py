"""A process's log: lines on stderr, written by a thread, so that a pipe, a terminal or a collector that stands still
holds up nothing else. Knows no line."""

import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque

STDERR = 2
MOST_LINES = 10_000  # that wait to be written; more are lost, and counted
LAST_SECONDS = 2.0  # for what waits when the process ends
RETRY_SECONDS = 0.05  # where stderr is one that says "not now" instead of waiting


def begin_log(level: int | str, process: str = "") -> None:
    """Of this process, once. `process`: which one it is, where it is not the server's first."""
    who = f"{process} " if process else ""
    handler = LineWriter(None if sys.stderr is None else STDERR)
    logging.basicConfig(level=level, format=f"%(asctime)s %(levelname)s {who}%(name)s: %(message)s", handlers=[handler])


class LineWriter(logging.Handler):
    """logging.shutdown() waits for what was said before, a while."""

    def __init__(self, descriptor: int | None) -> None:
        """None: nobody gave this process a stderr, and that number may be a client's connection by now."""
        super().__init__()
        self._descriptor = descriptor
        self._changed = threading.Condition()
        self._waiting: deque[str] = deque()  # the first one is being written
        self._lost = 0
        threading.Thread(target=self._write_lines, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            return self.handleError(record)
        with self._changed:
            if len(self._waiting) < MOST_LINES:
                self._waiting.append(line)
            else:
                self._lost += 1
            self._changed.notify_all()
        return None

    def flush(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, LAST_SECONDS)

    def _write_lines(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                line, lost = self._waiting[0], self._lost
            if lost:
                line = f"{lost} lines of the log could not be written\n{line}"
            is_written = self._write(line)
            with self._changed:
                self._waiting.popleft()
                self._lost += -lost if is_written else 1
                self._changed.notify_all()

    def _write(self, line: str) -> bool:
        """False where there is no stderr, its reader has gone, or its disk is full."""
        rest = memoryview(f"{line}\n".encode(errors="backslashreplace"))
        with contextlib.suppress(OSError):
            while self._descriptor is not None and rest:
                try:
                    rest = rest[os.write(self._descriptor, rest) :]
                except BlockingIOError:
                    time.sleep(RETRY_SECONDS)
        return not rest
