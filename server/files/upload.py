"""One upload: multipart bytes in, a checked file on the disk out. Blocking, and safe to close from another thread while
it works. Must not know HTTP's replies, and not who else uploads."""

import os
import secrets
import threading
from collections.abc import Callable

from server.errors import PayloadTooLarge
from server.files.examples import Form
from server.files.folder import FileFolder
from server.files.form import UploadFields, UploadForm
from server.files.jsonl import TrainingFileCheck


class UploadClosedError(Exception):
    """It was closed while it was fed: whoever sent it is gone."""


class Upload:
    """`feed` until the body ends, `finish`, and always `close`. What is not kept is removed."""

    def __init__(
        self,
        folder: FileFolder,
        content_type: str,
        owner: str,
        max_bytes: int,
        reserve: Callable[["Upload", int], None],
    ) -> None:
        """`reserve` is asked before every write, with the number of bytes; it raises when there is no room for them.
        Raises InvalidRequest, OSError."""
        self.id = f"file-{secrets.token_hex(16)}"
        self.owner = owner
        self.bytes = 0
        self.kept = False
        self._folder = folder
        self._max_bytes = max_bytes
        self._reserve = reserve
        self._form = UploadForm(content_type, self._write)
        self._check = TrainingFileCheck()
        self._working = threading.Lock()
        self._descriptor: int | None = folder.create(self.id)

    @property
    def examples(self) -> int:
        return self._check.examples

    @property
    def form(self) -> Form:
        assert self._check.form is not None  # finish() has accepted it
        return self._check.form

    def feed(self, body: bytes) -> None:
        """Raises LongwaveError for what it does not take, OSError, UploadClosedError."""
        with self._working:
            self._form.feed(body)

    def finish(self, keep: Callable[["Upload", UploadFields], None]) -> None:
        """Puts the file in its place and has it listed by `keep`; without that it is removed. Raises as `feed`."""
        with self._working:
            fields = self._form.finish()
            self._check.finish()
            self._folder.finish(self.id, self._open_descriptor())
            keep(self, fields)
            self.kept = True

    def close(self) -> None:
        """Waits for the piece that is being written. May be called twice."""
        with self._working:
            if self._descriptor is None:
                return
            if not self.kept:
                self._folder.remove(self.id)
            os.close(self._descriptor)  # after that a sweep may take what is not listed
            self._descriptor = None

    def _open_descriptor(self) -> int:
        if self._descriptor is None:
            raise UploadClosedError
        return self._descriptor

    def _write(self, data: bytes) -> None:
        descriptor = self._open_descriptor()
        if self.bytes + len(data) > self._max_bytes:
            raise PayloadTooLarge(f"The file is larger than {self._max_bytes} bytes.", param="file")
        self._check.feed(data)
        self._reserve(self, len(data))
        self.bytes += len(data)
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
