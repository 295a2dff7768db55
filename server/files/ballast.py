"""Room on the disk that is kept for deleting: SQLite writes before it forgets, also where a disk is full. Must not know
what is deleted."""

import contextlib
import fcntl
import logging
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from server.files.folder import PRIVATE, UNFINISHED

logger = logging.getLogger("longwave")

Result = TypeVar("Result")
BYTES = 256 * 2**10  # several times what SQLite writes to delete a row: a few pages of 4 KiB


class Ballast:
    """A file of no use, given up where there is no other room to delete in, and taken in again."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def delete(self, act: Callable[[], Result]) -> Result:
        """What `act` returns, one transaction that removes rows and then what they named: where the disk is full, tried
        again in the ballast's room. Raises what `act` does."""
        try:
            return act()
        except sqlite3.OperationalError as error:
            try:
                self._path.unlink()
            except FileNotFoundError:
                raise error from None
            logger.warning("%s: deleting in the room that is kept for it, %s", error, self._path)
            return act()
        finally:
            self.take()

    def take(self) -> None:
        """Where there is none, and room for one. It is whole or not there, whenever a server is killed."""
        with contextlib.suppress(OSError):  # another server is at it, or there is no room
            if self._path.exists() and self._path.stat().st_size >= BYTES:
                return
            unfinished = self._path.with_name(f"{self._path.name}{UNFINISHED}")
            with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | PRIVATE, 0o600), "wb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                try:
                    file.write(os.urandom(BYTES))  # zeros would take no room on some file systems
                    file.flush()
                    unfinished.rename(self._path)
                except OSError:
                    unfinished.unlink()
