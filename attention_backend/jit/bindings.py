"""The only imports of CuPy: NVRTC, the driver API and modules. Importing this file needs no CuPy and no GPU."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

from attention_backend.jit.errors import CupyMissingError


def nvrtc() -> ModuleType:
    """`cupy.cuda.nvrtc`. Raises CupyMissingError when CuPy or libnvrtc is not there."""
    try:
        from cupy.cuda import nvrtc as module

        module.getVersion()
    except Exception as error:  # CuPy's soft links raise several types, RuntimeError and OSError among them
        raise CupyMissingError(str(error)) from error
    return module


def driver() -> ModuleType:
    """`cupy.cuda.driver`: the CUDA driver API as plain functions of integers."""
    try:
        from cupy.cuda import driver as module
    except ImportError as error:
        raise CupyMissingError(str(error)) from error
    return module


@dataclass(frozen=True, slots=True)
class LoadedModule:
    """A CuPy module (unloaded with this object), its CUcontext, and the device's shared memory per block at most."""

    module: Any
    context: int
    max_smem: int


def load_module(cubin: bytes, device: int) -> LoadedModule:
    """Load a cubin into the primary context of `device`, which is torch's too."""
    try:
        import cupy
        from cupy.cuda import driver, function, runtime
    except ImportError as error:
        raise CupyMissingError(str(error)) from error
    with cupy.cuda.Device(device):
        module = function.Module()
        module.load(cubin)
        max_smem = runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, device)
        return LoadedModule(module, driver.ctxGetCurrent(), max_smem)
