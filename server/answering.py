"""Whether this server is answering anybody: one byte of memory that its training processes read. Knows no request.

A byte and not a message: a trainer looks at it hundreds of times a second, in the middle of a step.
"""

import mmap
import os
import tempfile
import weakref


class AnsweringSign:
    """Down at first. `fd` is for processes that this one starts: pass it on to them, it stays what it is there."""

    def __init__(self) -> None:
        self.fd = _memory()
        os.ftruncate(self.fd, 1)
        self._byte = mmap.mmap(self.fd, 1)
        weakref.finalize(self, os.close, self.fd)

    def show(self, answering: bool) -> None:
        self._byte[0] = answering


def _memory() -> int:
    """A file without a name: in memory where the system has such."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("longwave-answering")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class SignReader:
    """In a process that inherited the descriptor. Raises OSError when that is no sign."""

    def __init__(self, fd: int) -> None:
        self._byte = mmap.mmap(fd, 1, access=mmap.ACCESS_READ)

    def is_up(self) -> bool:
        return self._byte[0] != 0
