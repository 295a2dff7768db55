"""The files' bytes: a private folder, server-made names, and who may sweep what. Must not know the catalogue's SQL.

An upload keeps flock on its file, under whatever name, until the catalogue lists it. A crash frees the lock, so a file
that nobody holds and nobody lists is an orphan, whichever process looks.
"""

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

UNFINISHED = ".part"
LOCK_SECONDS, LOCK_INTERVAL = 10.0, 0.005
PRIVATE = os.O_NOFOLLOW | os.O_CLOEXEC


class FolderNotPrivateError(OSError):
    """The folder belongs to somebody else, or others may write to it."""


def make_private(path: Path) -> None:
    """Makes the folder, 0700, where there is none. Raises FolderNotPrivateError, OSError."""
    path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    facts = path.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        raise FolderNotPrivateError(f"{path} is not a folder of this user alone (mode 0700)")


class FileFolder:
    def __init__(self, path: Path) -> None:
        """Makes the folder, 0700. Raises OSError."""
        self.path = path
        make_private(path)
        (path / "content").mkdir(mode=0o700, exist_ok=True)
        self._content = path / "content"
        for directory in (path, path.parent):
            sync_folder(directory)

    def has_files(self) -> bool:
        """Finished ones or not, listed or not: whether anybody has ever begun an upload, most likely."""
        return any(self._content.iterdir())

    def content(self, file_id: str) -> Path:
        return self._content / file_id

    def create(self, file_id: str) -> int:
        """A new file under its unfinished name, locked, for writing: its descriptor."""
        with alone(self.path / "lock"):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | PRIVATE
            descriptor = os.open(self._content / f"{file_id}{UNFINISHED}", flags, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor

    def finish(self, file_id: str, descriptor: int) -> None:
        """Its bytes, then its final name, are on the disk when this returns."""
        os.fsync(descriptor)
        (self._content / f"{file_id}{UNFINISHED}").rename(self.content(file_id))
        sync_folder(self._content)

    def remove(self, file_id: str) -> None:
        """Under whichever name; nothing when it is gone already."""
        for name in (f"{file_id}{UNFINISHED}", file_id):
            (self._content / name).unlink(missing_ok=True)

    def sweep(self, listed: Callable[[str], bool]) -> int:
        """Removes what a crash left: files that are not listed and that no upload holds. How many they were."""
        swept = 0
        with alone(self.path / "lock"):
            for path in list(self._content.iterdir()):
                file_id = path.name.removesuffix(UNFINISHED)
                # Asked twice: it may be listed just before it is let go.
                if not (listed(file_id) or is_locked(path) or listed(file_id)):
                    path.unlink(missing_ok=True)
                    swept += 1
        return swept


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[None]:
    """One at a time, of all processes: nothing is between its creation and its own lock while somebody sweeps. Raises
    TimeoutError where another process stands still meanwhile."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | PRIVATE, 0o600)
    try:
        _lock(descriptor, lock)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"another process has held {path} for {LOCK_SECONDS:.0f} s") from None
            time.sleep(LOCK_INTERVAL)
        else:
            return


def sync_folder(directory: Path) -> None:
    """The names in it are on the disk when this returns."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool | None:
    """Whether a living process has flock on it; None for what cannot be opened: gone, or a link that somebody put
    there. Raises OSError where there are no locks."""
    try:
        descriptor = os.open(path, os.O_RDONLY | PRIVATE)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
