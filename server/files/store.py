"""The files of this server: folder, catalogue and quota in one. Blocking and thread-safe; must not know HTTP.

A file is listed only after its bytes and its name are on the disk, and unlisted before they go: a crash at any instant
leaves a whole file or an orphan, which the next start sweeps.
"""

import contextlib
import logging
import os
import re
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from server.equal_parts import EqualParts
from server.errors import FileMissing, InsufficientStorage, QuotaExceeded, ServerOverloaded
from server.files.ballast import Ballast
from server.files.catalog import Catalog, CatalogError, StoredFile
from server.files.folder import FileFolder, alone
from server.files.form import PURPOSE, UploadFields
from server.files.upload import Upload

logger = logging.getLogger("longwave")

MAX_UPLOADS = 32  # at once: each may hold a line, and occupies a thread for a moment per megabyte
FILE_ID = re.compile(r"file-[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class FileLimits:
    max_file_bytes: int
    max_total_bytes: int
    max_files: int


class FileStore:
    """Opens itself when it is first asked for something. Every method raises InsufficientStorage when the folder cannot
    be used; `owner` is a name for the key of whoever asks, and other owners' files do not exist for it."""

    def __init__(self, path: Path, limits: FileLimits, clock: Callable[[], float] = time.time) -> None:
        self.limits = limits
        self.failures = 0  # of the disk or the catalogue, since this server started
        self._path = path
        self._catalog = path / "catalog.sqlite3"
        self._clock = clock
        self._lock = threading.Lock()
        self._ballast = Ballast(path / "ballast")
        self._opened: tuple[FileFolder, Catalog] | None = None
        self._uploads: dict[str, int] = {}  # id -> bytes that it has reserved
        self._places = EqualParts(MAX_UPLOADS)

    def start(self) -> None:
        """Sweeps what a crash left, where there is a folder. Never raises: a server without files still answers."""
        if self._path.exists():
            with contextlib.suppress(InsufficientStorage), self._ready():
                pass  # opening sweeps; what is wrong is in the log

    def close(self) -> None:
        with self._lock:
            self._leave()

    def _leave(self) -> None:
        if self._opened is not None:
            self._opened[1].close()
            self._opened = None

    def begin(self, content_type: str, owner: str) -> Upload:
        """Raises InvalidRequest, QuotaExceeded, ServerOverloaded."""
        with self._ready() as (folder, catalog):
            self._remove_expired(folder, catalog)
            if not self._places.has_room(owner, 1):
                raise ServerOverloaded("The server is receiving too many files. Try again later.")
            count, total = catalog.usage()
            if count + len(self._uploads) >= self.limits.max_files:
                raise QuotaExceeded(f"The server holds {self.limits.max_files} files, which is its limit: delete some.")
            if total >= self.limits.max_total_bytes:
                raise self._full()
            upload = Upload(folder, content_type, owner, self.limits.max_file_bytes, self._reserve)
            self._uploads[upload.id] = 0
            self._places.hold(owner, 1)
            return upload

    def feed(self, upload: Upload, body: bytes) -> None:
        with self._storage_failures():
            upload.feed(body)

    def finish(self, upload: Upload) -> StoredFile:
        """The upload as a file that is listed from now on. Raises QuotaExceeded, and what is wrong with the file."""
        stored: list[StoredFile] = []
        with self._storage_failures():
            upload.finish(lambda upload, fields: stored.append(self._keep(upload, fields)))
        return stored[0]

    def end(self, upload: Upload) -> None:
        """Always, at last, and once: gives back what the upload held."""
        try:
            upload.close()
        finally:
            with self._lock:
                self._uploads.pop(upload.id, None)
                self._places.hold(upload.owner, -1)

    def page(self, owner: str, *, purpose: str | None, after: str | None, limit: int, order: str) -> list[StoredFile]:
        """Raises FileMissing for an `after` that is no file of the owner's."""
        now = self._clock()
        with self._ready() as (_, catalog):
            if after is not None and not (FILE_ID.fullmatch(after) and catalog.find(after, owner, now)):
                raise FileMissing(f"No such File object: {after[:64]}", param="after")
            return catalog.page(owner, purpose, after, limit, order, now)

    def get(self, file_id: str, owner: str) -> StoredFile:
        """Raises FileMissing."""
        with self._ready() as (_, catalog):
            return self._find(catalog, file_id, owner)

    def read(self, file_id: str, owner: str) -> tuple[StoredFile, BinaryIO]:
        """The file and its open bytes, which a delete does not take away. Raises FileMissing."""
        with self._ready() as (folder, catalog):
            stored = self._find(catalog, file_id, owner)
            return stored, folder.content(stored.id).open("rb")

    def link(self, file_id: str, owner: str, name: Path) -> None:
        """Gives the file's bytes a second name on the same disk, which outlives a delete. Raises FileMissing."""
        with self._ready() as (folder, catalog):
            os.link(folder.content(self._find(catalog, file_id, owner).id), name)

    def put(self, file_id: str, owner: str, *, purpose: str, filename: str, content: bytes, lines: int) -> StoredFile:
        """A file that the server itself makes; again, after a crash, it is the one that is there. It counts in the
        quota and is not refused by it: its job has been done."""
        created = int(self._clock())
        with self._ready() as (folder, catalog), self._alone():
            known = catalog.find(file_id, owner, created)
            if known is not None:
                return known
            folder.remove(file_id)
            descriptor = folder.create(file_id)
            try:
                with os.fdopen(descriptor, "wb", closefd=False) as file:
                    file.write(content)
                folder.finish(file_id, descriptor)
                stored = StoredFile(file_id, owner, purpose, filename, len(content), created, None, None, lines)
                catalog.add(stored, sys.maxsize, sys.maxsize)
            except BaseException:
                folder.remove(file_id)
                raise
            finally:
                os.close(descriptor)
            return stored

    def delete(self, file_id: str, owner: str) -> None:
        """Raises FileMissing."""
        with self._ready() as (folder, catalog), self._alone():
            stored, now = self._find(catalog, file_id, owner), self._clock()
            if not self._ballast.delete(lambda: catalog.remove(stored.id, owner, now)):
                raise FileMissing(f"No such File object: {file_id}", param="id")
            folder.remove(file_id)
            self._ballast.take()

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        """While a listing and the bytes of a file that has a name before it is made change together: a job's result
        may be put by two servers at once, and deleted by a third."""
        return alone(self._path / "results.lock")

    def _find(self, catalog: Catalog, file_id: str, owner: str) -> StoredFile:
        stored = catalog.find(file_id, owner, self._clock()) if FILE_ID.fullmatch(file_id) else None
        if stored is None:
            raise FileMissing(f"No such File object: {file_id[:64]}", param="id")
        return stored

    def _keep(self, upload: Upload, fields: UploadFields) -> StoredFile:
        created = int(self._clock())
        stored = StoredFile(
            id=upload.id,
            owner=upload.owner,
            purpose=PURPOSE,
            filename=fields.filename,
            bytes=upload.bytes,
            created_at=created,
            expires_at=None if fields.expires_in is None else created + fields.expires_in,
            form=upload.form,
            examples=upload.examples,
        )
        with self._ready() as (_, catalog):
            if not catalog.add(stored, self.limits.max_files, self.limits.max_total_bytes):
                raise self._full()
            self._uploads.pop(upload.id, None)  # in one step with the listing: no byte counts twice
        return stored

    def _reserve(self, upload: Upload, more: int) -> None:
        with self._ready() as (_, catalog):
            if catalog.usage()[1] + sum(self._uploads.values()) + more > self.limits.max_total_bytes:
                raise self._full()
            self._uploads[upload.id] += more

    def _full(self) -> QuotaExceeded:
        return QuotaExceeded(
            f"The server's files may take {self.limits.max_total_bytes} bytes together, and this one does not fit: "
            "delete some."
        )

    def _remove_expired(self, folder: FileFolder, catalog: Catalog) -> None:
        now = self._clock()
        for file_id in self._ballast.delete(lambda: catalog.remove_expired(now)):
            folder.remove(file_id)
        self._ballast.take()

    @contextlib.contextmanager
    def _ready(self) -> Iterator[tuple[FileFolder, Catalog]]:
        with self._storage_failures(), self._lock:
            if not self._catalog.exists():  # it has never been there, or is gone: what is written to it would be, too
                self._leave()
            if self._opened is None:
                self._opened = self._open()
            yield self._opened

    def _open(self) -> tuple[FileFolder, Catalog]:
        folder = FileFolder(self._path)
        with alone(folder.path / "lock"):  # two servers may start at once on a new folder
            catalog = Catalog(self._catalog, has_files=folder.has_files())
        try:
            self._remove_expired(folder, catalog)
            swept = folder.sweep(catalog.holds)
        except BaseException:
            catalog.close()
            raise
        if swept:
            logger.warning("removed %d files of uploads that a crash cut short", swept)
        return folder, catalog

    @contextlib.contextmanager
    def _storage_failures(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error, CatalogError) as error:
            logger.error("files in %s: %s", self._path, error)
            with self._lock:
                self.failures += 1
            if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
                self.close()  # damaged while it was open: the next call looks at it anew
            raise InsufficientStorage(
                "The server cannot keep files: its disk is full, or its data directory cannot be used."
            ) from error
