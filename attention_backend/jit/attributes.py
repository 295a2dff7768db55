"""Launches with attributes: cuLaunchKernelEx, which CuPy lacks.

Early ones may start before the previous kernel of the stream has ended (programmatic dependent launch, CUDA C++
Programming Guide; captured in a CUDA graph it becomes a programmatic edge, driver 12.3 and up). The blocks of
cooperative ones are all on the GPU at once, or none is: they may wait for each other. Knows no kernel.
"""

import ctypes
from ctypes import c_int, c_uint, c_void_p
from functools import lru_cache

from attention_backend.jit.errors import LaunchError

_COOPERATIVE, _PROGRAMMATIC_STREAM_SERIALIZATION = 2, 6  # CUlaunchAttributeID


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute with the one value that is used: an int in a union of 64 bytes."""

    _fields_ = (("id", c_int), ("_pad", c_int), ("value", c_int), ("_union", c_int * 15))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig"""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("smem_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", c_uint),
    )


_ATTRIBUTES = (_Attribute * 2)(
    _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1), _Attribute(id=_COOPERATIVE, value=1)
)


def launch(
    function: int,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    smem_bytes: int,
    stream: int,
    parameters: int,
    *,
    early: bool,
    cooperative: bool,
) -> None:
    """As cuLaunchKernel, but early, cooperative or both. `parameters` is the address of the array of pointers to them.

    Raises LaunchError with the driver's words.
    """
    chosen = _ATTRIBUTES if early else ctypes.pointer(_ATTRIBUTES[1])
    config = LaunchConfig((c_uint * 3)(*grid), (c_uint * 3)(*block), smem_bytes, stream, chosen, early + cooperative)
    driver = _driver()
    code = driver.cuLaunchKernelEx(ctypes.byref(config), c_void_p(function), c_void_p(parameters), None)
    if code:
        words = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(words))
        said = words.value.decode() if words.value else "unknown error"
        raise LaunchError(f"a launch of grid {grid}, block {block}, {smem_bytes} bytes: CUDA error {code}, {said}")


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
