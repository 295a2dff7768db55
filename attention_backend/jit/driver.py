"""The CUDA driver's calls that kernels need, by ctypes: loading, limits, contexts, launches. Knows no kernel.

Not CuPy's: it takes 70 to 90 ms to load, several times what a first call takes whose kernel is in the cache.
"""

import ctypes
from ctypes import c_int, c_uint, c_void_p
from functools import lru_cache
from typing import Any

from attention_backend.jit.errors import LaunchError

Dim3 = tuple[int, int, int]

_COOPERATIVE, _PROGRAMMATIC_STREAM_SERIALIZATION = 2, 6  # CUlaunchAttributeID
_MOST_DYNAMIC_SMEM = 8  # CUfunction_attribute
_MOST_SMEM_OPT_IN = 97  # CUdevice_attribute


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute with the one value that is used: an int in a union of 64 bytes."""

    _fields_ = (("id", c_int), ("_pad", c_int), ("value", c_int), ("_union", c_int * 15))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig"""

    _fields_ = (
        *((f"{of}_{axis}", c_uint) for of in ("grid", "block") for axis in "xyz"),
        ("smem_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("num_attributes", c_uint),
    )


_ATTRIBUTES = (_Attribute * 2)(
    _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1), _Attribute(id=_COOPERATIVE, value=1)
)
_EARLY, _COOPERATIVE_ONLY = (ctypes.addressof(x) for x in _ATTRIBUTES)


class Driver:
    """Handles (functions, contexts, streams) are integers. Every call raises LaunchError with the driver's name of the
    error (CUDA_ERROR_OUT_OF_MEMORY) and its words."""

    def __init__(self, library: Any) -> None:
        """`library` is libcuda, or what has its functions."""
        self._library = library
        self._launch_kernel = library.cuLaunchKernelEx
        self._get_context = library.cuCtxGetCurrent

    def current_context(self) -> int:
        """Of this thread; 0 when it has none yet."""
        context = c_void_p()
        self._check(self._get_context(ctypes.byref(context)), "the current context")
        return context.value or 0

    def set_context(self, context: int) -> None:
        self._check(self._library.cuCtxSetCurrent(c_void_p(context)), "another context")

    def primary_context(self, device: int) -> int:
        """The one that torch uses too; kept until the process ends."""
        context, handle = c_void_p(), self._device(device)
        self._check(
            self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), f"the context of device {device}"
        )
        return context.value or 0

    def most_smem(self, device: int) -> int:
        """Bytes of shared memory that a block can have when its kernel opts in."""
        value, handle = c_int(), self._device(device)
        code = self._library.cuDeviceGetAttribute(ctypes.byref(value), _MOST_SMEM_OPT_IN, handle)
        self._check(code, f"the shared memory of device {device}")
        return value.value

    def load(self, cubin: bytes, kernel: str) -> int:
        """The function `kernel` of a cubin, loaded into the current context until the process ends."""
        module, function = c_void_p(), c_void_p()
        self._check(self._library.cuModuleLoadData(ctypes.byref(module), cubin), f"loading {kernel}")
        code = self._library.cuModuleGetFunction(ctypes.byref(function), module, kernel.encode())
        self._check(code, f"finding {kernel} in its cubin")
        return function.value or 0

    def allow_smem(self, function: int, smem_bytes: int) -> None:
        """Dynamic shared memory that launches of a function may ask for."""
        code = self._library.cuFuncSetAttribute(c_void_p(function), _MOST_DYNAMIC_SMEM, smem_bytes)
        self._check(code, f"{smem_bytes} bytes of shared memory")

    def launch(
        self,
        function: int,
        grid: Dim3,
        block: Dim3,
        smem_bytes: int,
        stream: int,
        parameters: int,
        *,
        early: bool = False,
        cooperative: bool = False,
    ) -> None:
        """cuLaunchKernelEx; `parameters` is the address of an array of pointers to them, which the driver copies.

        An early kernel may start before the stream's previous one has ended (programmatic dependent launch, CUDA C++
        Programming Guide; in a CUDA graph it becomes a programmatic edge, driver 12.3 and up). The blocks of a
        cooperative one are all on the GPU at once, or none is.
        """
        first = _EARLY if early else _COOPERATIVE_ONLY
        config = _LaunchConfig(*grid, *block, smem_bytes, stream, first, early + cooperative)
        code = self._launch_kernel(ctypes.byref(config), c_void_p(function), c_void_p(parameters), None)
        if code:
            self._check(code, f"a launch of grid {grid}, block {block}, {smem_bytes} bytes")

    def _device(self, index: int) -> c_int:
        handle = c_int()
        self._check(self._library.cuDeviceGet(ctypes.byref(handle), index), f"device {index}")
        return handle

    def _check(self, code: int, what: str) -> None:
        if code:
            name, words = ctypes.c_char_p(b"unknown"), ctypes.c_char_p(b"unknown error")
            self._library.cuGetErrorName(code, ctypes.byref(name))
            self._library.cuGetErrorString(code, ctypes.byref(words))
            said = ", ".join((x.value or b"").decode() for x in (name, words))
            raise LaunchError(f"{what}: CUDA error {code}, {said}")


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """libcuda. Raises LaunchError where there is no driver."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise LaunchError(f"no CUDA driver: {error}") from error


@lru_cache(maxsize=1)
def driver() -> Driver:
    return Driver(library())
