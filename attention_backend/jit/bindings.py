"""NVRTC: the only import of CuPy. Importing this file needs no CuPy and no GPU."""

import ctypes
import threading
from functools import lru_cache
from types import ModuleType

from attention_backend.jit.errors import CupyMissingError

#: Held by who opens libnvrtc or, in a first compilation, its other parts: of two threads at once one has missed those.
LOADING = threading.RLock()


def nvrtc() -> ModuleType:
    """`cupy.cuda.nvrtc`. Raises CupyMissingError when CuPy or libnvrtc is not there."""
    nvrtc_version()  # loads the library of which the version is told, before CuPy looks for one
    try:
        with LOADING:  # CuPy opens the library at its first use
            from cupy.cuda import nvrtc as module

            module.getVersion()
    except Exception as error:  # CuPy's soft links raise several types, RuntimeError and OSError among them
        raise CupyMissingError(str(error)) from error
    return module


@lru_cache(maxsize=1)
def nvrtc_version() -> tuple[int, int]:
    """Of the NVRTC that CuPy uses, found as CuPy 14 finds it but without CuPy, which takes longer to load than all else
    of a first call whose kernel is cached. Raises CupyMissingError."""
    with LOADING:
        return _version_of_the_one_found()


def _version_of_the_one_found() -> tuple[int, int]:
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        path = load_nvidia_dynamic_lib("nvrtc").abs_path
    except Exception as error:  # it has a type of its own for a library that is nowhere, and others for strange systems
        raise CupyMissingError(str(error)) from error
    if path is None:
        raise CupyMissingError("libnvrtc is loaded from nowhere")
    major, minor = ctypes.c_int(), ctypes.c_int()
    if code := ctypes.CDLL(path).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)):
        raise CupyMissingError(f"NVRTC error {code} when asked for its version")
    return major.value, minor.value
