"""Reads the weights of a folder to a device by several threads, beside whatever the process does meanwhile. Imports no
transformers.

A file's bytes go through page-locked buffers, of which one is filled while another is copied: one H200 read 16 GB from
the page cache at 24 GB/s so, and at 6 by copies of mapped files.
"""

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from models.stored_weights import StoredTensor, together

THREADS = 8
CHUNK = 16 << 20  # bytes of one read and one copy
BUFFERS = 2  # of a thread
#: Seconds after which a thread that computes lets others go on: importing modules holds the interpreter all the time,
#: and with Python's 5 ms each of thousands of reads would wait for that long.
SWITCH_INTERVAL = 0.0005
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes of a file, and where they go."""

    file: Path
    begin: int
    target: Tensor  # uint8 [size]


class WeightReading:
    """Begins when it is made."""

    def __init__(self, tensors: Sequence[StoredTensor], device: torch.device) -> None:
        """`tensors` are of 16 bits, with different names."""
        self._stored = tensors
        self._device = device
        self._tensors: dict[str, Tensor] = {}
        self._failure: BaseException | None = None
        self._switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(min(SWITCH_INTERVAL, self._switch_interval))
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def finish(self) -> dict[str, Tensor]:
        """The tensors by name, when all are there; those of a group (`stored_weights.together`) are views of one. Once:
        the caller alone holds them then. Raises what reading raised: OSError, torch.OutOfMemoryError."""
        self._thread.join()
        sys.setswitchinterval(self._switch_interval)
        tensors, self._tensors = self._tensors, {}
        if self._failure is not None:
            tensors.clear()
            raise self._failure
        return tensors

    def _run(self) -> None:
        try:
            pieces = self._pieces()
            with ThreadPoolExecutor(min(THREADS, len(pieces)), thread_name_prefix="weights") as pool:
                shared = _Shared(pieces)
                for done in [pool.submit(self._copy, shared) for _ in range(min(THREADS, len(pieces)))]:
                    done.result()
        except BaseException as error:
            self._failure = error

    def _pieces(self) -> list[_Piece]:
        """In the order of the files, for tensors that are allocated here."""
        pieces = []
        for group in together(self._stored):
            rows = [member.shape[0] if member.shape else 1 for member in group]
            whole = torch.empty(
                (sum(rows), *group[0].shape[1:]) if group[0].shape else (),
                dtype=_DTYPES[group[0].dtype],
                device=self._device,
            )
            parts = whole.split(rows) if whole.dim() else (whole,)
            for member, part in zip(group, parts, strict=True):
                self._tensors[member.name] = part
                target = part.view(-1).view(torch.uint8)
                if target.numel() != member.size:
                    raise OSError(f"{member.file}: {member.name} is not as large as its shape")
                for start in range(0, member.size, CHUNK):
                    pieces.append(_Piece(member.file, member.begin + start, target[start : start + CHUNK]))
        return sorted(pieces, key=lambda piece: (piece.file, piece.begin))

    def _copy(self, pieces: "_Shared") -> None:
        try:
            self._copy_all(pieces)
        except BaseException:
            pieces.end()  # one that failed is enough
            raise

    def _copy_all(self, pieces: "_Shared") -> None:
        on_gpu = self._device.type == "cuda"
        buffers = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(BUFFERS)]
        if not on_gpu:
            for piece in pieces:
                self._fill(buffers[0], piece)
                piece.target.copy_(buffers[0][: piece.target.numel()])
            return
        stream = torch.cuda.Stream(self._device)
        copied = [torch.cuda.Event() for _ in buffers]
        with torch.cuda.stream(stream):
            for turn, piece in enumerate(pieces):
                buffer, event = buffers[turn % BUFFERS], copied[turn % BUFFERS]
                event.synchronize()
                self._fill(buffer, piece)
                piece.target.copy_(buffer[: piece.target.numel()], non_blocking=True)
                event.record(stream)
        stream.synchronize()

    def _fill(self, buffer: Tensor, piece: _Piece) -> None:
        size, done = piece.target.numel(), 0
        place = buffer.numpy().data
        descriptor = os.open(piece.file, os.O_RDONLY)
        try:
            while done < size:
                count = os.preadv(descriptor, [place[done:size]], piece.begin + done)
                if count == 0:
                    raise OSError(f"{piece.file} became shorter while it was read")
                done += count
        finally:
            os.close(descriptor)


class _Shared:
    """Pieces for several threads, each of them once."""

    def __init__(self, pieces: Sequence[_Piece]) -> None:
        self._pieces: Iterator[_Piece] = iter(pieces)
        self._lock = threading.Lock()

    def end(self) -> None:
        with self._lock:
            self._pieces = iter(())

    def __iter__(self) -> Iterator[_Piece]:
        while True:
            with self._lock:
                piece = next(self._pieces, None)
            if piece is None:
                return
            yield piece
