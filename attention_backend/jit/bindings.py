"""The only imports of CuPy: NVRTC, modules and the driver API. Importing this file needs no CuPy and no GPU."""

import threading
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from attention_backend.jit.errors import CupyMissingError

_LOADING = threading.Lock()


def nvrtc() -> ModuleType:
    """`cupy.cuda.nvrtc`. Raises CupyMissingError when CuPy or libnvrtc is not there."""
    try:
        with (
            _LOADING
        ):  # CuPy opens libnvrtc at its first use; by two threads at once, NVRTC then misses its other parts
            from cupy.cuda import nvrtc as module

            module.getVersion()
    except Exception as error:  # CuPy's soft links raise several types, RuntimeError and OSError among them
        raise CupyMissingError(str(error)) from error
    return module


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A kernel in a context: its CUfunction and CUcontext, and the most shared memory a block of the device can have.

    `driver` is `cupy.cuda.driver`, the driver API as plain functions of integers. `module` keeps the code loaded.
    """

    function: int
    context: int
    max_smem: int
    driver: Any
    module: Any


def load_kernel(cubin: bytes, name: str, device: int) -> LoadedKernel:
    """Load a cubin into the primary context of `device`, which is torch's too."""
    try:
        import cupy
        from cupy.cuda import driver, function, runtime
    except ImportError as error:
        raise CupyMissingError(str(error)) from error
    with cupy.cuda.Device(device):
        module = function.Module()
        module.load(cubin)
        return LoadedKernel(
            function=module.get_function(name).ptr,
            context=driver.ctxGetCurrent(),
            max_smem=runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
            driver=driver,
            module=module,
        )
