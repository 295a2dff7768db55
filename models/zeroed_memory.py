"""Host memory for tensors of zeros, touched by threads beside whatever the process does meanwhile. Knows no model.

The kernel gives a page when it is first written, as zeros. Writing here finds memory that is not there at a start, and
not in the middle of a request. One byte a page does.
"""

import math
import mmap
import threading
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from models.host import HostMemoryError, usable_cpus

SLICE = 256 << 20  # bytes that a thread touches at once, without the interpreter
MOST_THREADS = 4
ALIGNMENT = 64  # bytes, torch's own on a CPU


class ZeroedMemory:
    """Begins to be touched when it is made; is free again when it and the tensors of `take` are gone."""

    def __init__(self, num_bytes: int) -> None:
        """Raises HostMemoryError when the kernel refuses so much."""
        try:
            self._memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise HostMemoryError(f"{num_bytes / 2**30:.2f} GiB of host memory cannot be had: {error}") from error
        self._size = self._wanted = num_bytes
        self._begun = self._touched = 0
        self._lock = threading.Lock()
        # One CPU is left to whoever goes on meanwhile.
        count = max(1, min(MOST_THREADS, usable_cpus() - 1, -(-num_bytes // SLICE)))
        self._threads = [threading.Thread(target=self._touch, name="zeros", daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    @property
    def touched(self) -> int:
        """Bytes that are no free memory any more."""
        return self._touched

    def take(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[Tensor]:
        """Zeros of the first of `shapes`, as many as there is room for, when they have been touched. Once: what is left
        goes back to the kernel."""
        parts, end = [], 0
        for shape in shapes:
            begin = -(-end // ALIGNMENT) * ALIGNMENT
            size = math.prod(shape) * dtype.itemsize
            if begin + size > self._size:
                break
            parts.append((begin, size))
            end = begin + size
        with self._lock:
            self._wanted = end
        for thread in self._threads:
            thread.join()
        rest = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        if rest < self._size:
            self._memory.madvise(mmap.MADV_DONTNEED, rest)
        return [
            torch.frombuffer(self._memory, dtype=torch.uint8, offset=begin, count=size).view(dtype).view(tuple(shape))
            for (begin, size), shape in zip(parts, shapes, strict=False)
        ]

    def _touch(self) -> None:
        pages = np.frombuffer(self._memory, np.uint8)
        while (begin := self._next()) is not None:
            piece = pages[begin : begin + SLICE]
            piece[:: mmap.PAGESIZE] = 0
            with self._lock:
                self._touched += piece.size

    def _next(self) -> int | None:
        """Where the next slice begins that is to be touched."""
        with self._lock:
            begin = self._begun
            if begin >= self._wanted:
                return None
            self._begun = begin + SLICE
            return begin
