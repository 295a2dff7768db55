"""Which servers of a data directory live: each keeps flock on a file of its own, and the kernel lets go when the
process ends, however it ends. Knows no jobs.

Only a lock that can be had says something: its server is gone. One that is held may be of a process that stands still,
and where a server has no lock (the file system knows none) nobody can tell.
"""

import contextlib
import fcntl
import logging
import os
import time
from pathlib import Path

from server.files.folder import PRIVATE, is_locked

logger = logging.getLogger("longwave")

KEPT_SECONDS = 3600.0  # what killed servers leave: much longer than a lease


class Holders:
    """`folder`/<name>, locked by the server of that name."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._descriptor: int | None = None

    def enter(self) -> None:
        """From now on the others see that this server lives. Raises OSError."""
        if self._descriptor is not None:
            return
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._sweep()
        path = self._folder / self._name
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | PRIVATE, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            path.unlink()
            logger.warning("%s has no locks (%s): leases of killed servers have to lapse", self._folder, error)
        else:
            self._descriptor = descriptor

    def leave(self) -> None:
        if self._descriptor is not None:
            (self._folder / self._name).unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None

    def is_gone(self, name: str) -> bool:
        """Whether the server of that name has certainly ended. One that has left, and one nobody knows, may live."""
        return name != self._name and _is_free(self._folder / name)

    def _sweep(self) -> None:
        """What was killed long ago goes: its leases have lapsed."""
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another server was faster
                if time.time() - path.stat().st_mtime > KEPT_SECONDS and _is_free(path):
                    path.unlink()


def _is_free(path: Path) -> bool:
    try:
        return is_locked(path) is False
    except OSError:
        return False
