"""Whether work on a GPU makes the host wait in the middle of it, which no CUDA graph can record. Knows no steps."""

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_TOLD = "called a synchronizing CUDA operation"  # by torch, whatever the operation


class HostWaitsError(RuntimeError):
    """The host waits for the device; the message says where."""


@contextmanager
def refusing_waits() -> Iterator[None]:
    """Raises HostWaitsError where torch would wait for the device in this block. It is a mode of the whole process, so
    no other thread may use the device meanwhile."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if _TOLD not in str(error):
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise HostWaitsError(f"{Path(place.filename).name}, line {place.lineno}: {place.line}") from error
    finally:
        torch.cuda.set_sync_debug_mode(before)
