"""Zeroed int32 counters for kernels that leave them at zero. Knows no kernel.

Two launches may share counters only if one ends before the other starts, so whatever may run at once has its own:

* Outside of CUDA graphs, a stream: its launches run one after another. (A stream's raw handle is the key. A new stream
  may get the handle of a destroyed one; its work would have to overlap what the old one left unfinished. Of two
  launches of a stream that run beside each other, one has the counters behind the other's: kernels/beside.py.)
* In a captured graph, a stream of one capture. Launches of that stream are a chain in the graph, and launches of one
  graph run one after another, whatever stream it is replayed on; eager work, other graphs and the graph's other
  branches have other counters, so graphs may be replayed beside anything.

A graph keeps the addresses for as long as it lives, which nobody is told. So its counters come out of a reserve that is
never freed nor handed out again (1 KB a graph, mostly; some hundred where layers' chains are in it), allocated outside
of captures: memory from inside would belong to the graphs' pool, where another graph may get the same addresses. A
replay that starts finds zeros because the launches of the last one left zeros: nothing has to be cleared in the graph.

Without a reserve (the first call of a device is captured, or many captures came without a call outside) the counters
are allocated and cleared inside the capture, before their first use, so that each replay clears them whatever the pool
did with them since; a reference is held until another capture or an eager call on the stream shows that the capture is
over.
"""

import ctypes
import threading
from functools import lru_cache

import torch
from torch import Tensor

_RESERVED = 1 << 19  # counters of a reserve
_GRANULE = 256  # counters that are handed out together
_PER_THREAD_STREAM = 2  # the driver's handle of "this thread's default stream"


class CaptureError(RuntimeError):
    """The driver does not say which capture a stream is in."""


class Reserve:
    """Zeros at fixed addresses, handed out once."""

    def __init__(self, zeros: Tensor) -> None:
        self._zeros = zeros
        self._used = 0

    @property
    def left(self) -> int:
        return self._zeros.numel() - self._used

    def take(self, count: int) -> Tensor | None:
        """`count` counters or more, or None when so many are not left."""
        granted = -(-count // _GRANULE) * _GRANULE
        if granted > self.left:
            return None
        self._used += granted
        return self._zeros[self._used - granted : self._used]


class Workspace:
    """The counters of all devices, streams and captures of a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._eager: dict[tuple[int, int, int], Tensor] = {}
        self._captured: dict[tuple[int, int], tuple[int, Tensor]] = {}
        self._reserves: dict[int, list[Reserve]] = {}  # graphs use all of them; the last one is handed out

    def counters(self, device: torch.device, stream: int, count: int, capture: int | None) -> Tensor:
        """At least `count` zeros for launches on `stream`, which is in `capture` (None: in no capture)."""
        index = device.index or 0
        with self._lock:
            if capture is None:
                self._captured.pop((index, stream), None)
                self._refill(index, device)
                thread = threading.get_ident() if stream == _PER_THREAD_STREAM else 0
                return self._grown(self._eager, (index, stream, thread), device, count)
            known = self._captured.get((index, stream))
            if known is not None and known[0] == capture and known[1].numel() >= count:
                return known[1]
            reserves = self._reserves.get(index)
            taken = reserves[-1].take(count) if reserves else None
            if taken is None:
                taken = torch.zeros(count, dtype=torch.int32, device=device)
            self._captured[index, stream] = (capture, taken)
            return taken

    def _refill(self, index: int, device: torch.device) -> None:
        reserves = self._reserves.setdefault(index, [])
        if not reserves or reserves[-1].left < _RESERVED // 2:
            zeros = torch.zeros(_RESERVED, dtype=torch.int32, device=device)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # replays on any stream must find zeros
            reserves.append(Reserve(zeros))

    @staticmethod
    def _grown(
        made: dict[tuple[int, int, int], Tensor], key: tuple[int, int, int], device: torch.device, count: int
    ) -> Tensor:
        counters = made.get(key)
        if counters is None or counters.numel() < count:
            granted = -(-count // _GRANULE) * _GRANULE
            counters = made[key] = torch.zeros(granted, dtype=torch.int32, device=device)
        return counters


_workspace = Workspace()


def counters(device: torch.device, count: int) -> Tensor:
    """At least `count` int32 zeros for launches on the device's current stream that leave them at zero.

    Hold the tensor until the launch is queued: when another thread wants more for the stream, the workspace lets it go.
    Raises CaptureError when the driver refuses to say which capture the stream is in.
    """
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    return _workspace.counters(device, stream, count, _capture_of(stream))


def _capture_of(stream: int) -> int | None:
    """The capture that a stream is in: a number that the process uses once."""
    if stream == 0:  # the legacy default stream cannot be captured
        return None
    status, capture = ctypes.c_int(), ctypes.c_uint64()
    code = _driver().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(capture), None, None, None
    )
    if code != 0:
        raise CaptureError(f"CUDA error {code} for stream {stream:#x}")
    return capture.value if status.value == 1 else None


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
