"""A variant -> a kernel on a device, launched on torch's current stream. Knows no kernel and allocates nothing."""

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from attention_backend.jit import driver as drivers
from attention_backend.jit.artefact import Artefact
from attention_backend.jit.cache import default_cache
from attention_backend.jit.driver import Dim3, Driver
from attention_backend.jit.errors import LaunchError, UnsupportedArchError
from attention_backend.jit.report import CompileReport
from attention_backend.jit.spec import KernelVariant, capability_of, runs_on

Argument = torch.Tensor | np.generic | ctypes.Structure | bytes | None
Parameters = ctypes.Structure | np.void | tuple[Argument, ...]

_DEFAULT_SMEM = 48 * 1024  # dynamic plus static, unless a kernel opts in to more
_EARLY_FROM = (9, 0)  # the compute capability from which a kernel can start before the previous one has ended
_ONE_POINTER = ctypes.c_void_p * 1
_ONE_BYTES = ctypes.c_char_p * 1

_loaded: dict[tuple[KernelVariant, int], "Kernel"] = {}
_setting_up = threading.Lock()


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A kernel in a context: CUfunction and CUcontext, and the most shared memory a block of the device can have."""

    driver: Driver
    function: int
    context: int
    max_smem: int


class Kernel:
    """A compiled kernel in one device's context. Call it to launch.

    `kernel(grid, block, params, smem_bytes)` launches on the stream that is torch's current one for the kernel's device
    at that moment (a kept stream would record an empty CUDA graph). `params` is

    * a ctypes.Structure or numpy structured scalar: the kernel's one parameter, a structure by value;
    * or a tuple with one entry per parameter: a CUDA tensor (its data pointer), a numpy scalar, a structure, bytes by
      value, or None for a null pointer. Python numbers are refused, their width being unknown.

    With `early=True` the kernel may start while the previous one of the stream still runs, once all of that one's
    blocks have called let_next_start() (kernels/parts/dependent_launch.cuh) or have ended; the kernel itself must call
    wait_for_previous(). Before sm_90 it starts as ever. With `cooperative=True` all blocks run at once, so they may
    wait for each other; LaunchError when they cannot.

    `max_smem` is the most dynamic shared memory a block can have, in bytes; `report` is what the compiler said.
    Raises LaunchError when sizes do not fit the kernel's parameters or the device's shared memory.
    """

    __slots__ = (
        "_context",
        "_current_stream",
        "_driver",
        "_function",
        "_knows_early",
        "_parameter_sizes",
        "_pointers",
        "_smem_limit",
        "_struct_size",
        "device",
        "max_smem",
        "report",
        "variant",
    )

    def __init__(
        self,
        variant: KernelVariant,
        device: int,
        report: CompileReport,
        loaded: LoadedKernel,
        current_stream: Callable[[int], int],
    ) -> None:
        """`current_stream` gives the raw handle of torch's current stream of a device."""
        self.variant = variant
        self.device = device
        self.report = report
        self._driver, self._function, self._context = loaded.driver, loaded.function, loaded.context
        self._current_stream = current_stream
        self._knows_early = capability_of(variant.arch) >= _EARLY_FROM
        self.max_smem = loaded.max_smem - report.static_smem
        self._smem_limit = _DEFAULT_SMEM - report.static_smem
        self._parameter_sizes = report.parameter_sizes
        self._pointers = ctypes.c_void_p * len(report.parameter_sizes)
        self._struct_size = report.parameter_sizes[0] if len(report.parameter_sizes) == 1 else -1

    def __call__(
        self,
        grid: Dim3,
        block: Dim3,
        params: Parameters,
        smem_bytes: int = 0,
        *,
        early: bool = False,
        cooperative: bool = False,
    ) -> None:
        driver = self._driver
        previous = driver.current_context()
        if previous == self._context:
            self._launch(grid, block, params, smem_bytes, early and self._knows_early, cooperative)
            return
        # Another device is current, or this is a new thread, without a context yet.
        driver.set_context(self._context)
        try:
            self._launch(grid, block, params, smem_bytes, early and self._knows_early, cooperative)
        finally:
            driver.set_context(previous)

    def _launch(
        self, grid: Dim3, block: Dim3, params: Parameters, smem_bytes: int, early: bool, cooperative: bool
    ) -> None:
        pointers: Any  # the array of pointers to parameters that cuLaunchKernel takes; it copies what they point to
        if isinstance(params, ctypes.Structure):
            if ctypes.sizeof(params) != self._struct_size:
                raise self._mismatch((ctypes.sizeof(params),))
            pointers = _ONE_POINTER(ctypes.addressof(params))
        elif isinstance(params, np.void):
            raw = params.tobytes()
            if len(raw) != self._struct_size:
                raise self._mismatch((len(raw),))
            pointers = _ONE_BYTES(raw)
        else:
            values = [x if isinstance(x, ctypes.Structure) else self._by_value(x) for x in params]
            sizes = tuple(map(ctypes.sizeof, values))
            if sizes != self._parameter_sizes:
                raise self._mismatch(sizes)
            pointers = self._pointers(*map(ctypes.addressof, values))
        if smem_bytes > self._smem_limit:
            self._raise_smem_limit(smem_bytes)
        stream = self._current_stream(self.device)
        self._driver.launch(
            self._function, grid, block, smem_bytes, stream, ctypes.addressof(pointers),
            early=early, cooperative=cooperative,
        )  # fmt: skip

    def _raise_smem_limit(self, smem_bytes: int) -> None:
        if smem_bytes > self.max_smem:
            raise LaunchError(
                f"{self.variant} asks for {smem_bytes} bytes of dynamic shared memory; "
                f"device {self.device} has {self.max_smem} for it"
            )
        with _setting_up:
            if smem_bytes > self._smem_limit:
                self._driver.allow_smem(self._function, smem_bytes)
                self._smem_limit = smem_bytes

    def _mismatch(self, sizes: tuple[int, ...]) -> LaunchError:
        return LaunchError(f"{self.variant} has parameters of {list(self._parameter_sizes)} bytes, got {list(sizes)}")

    def _by_value(self, argument: torch.Tensor | np.generic | bytes | None) -> Any:
        """A ctypes object that holds the bytes of one parameter."""
        if isinstance(argument, torch.Tensor):
            if argument.device.type != "cuda" or argument.device.index != self.device:
                raise LaunchError(f"{self.variant} is on cuda:{self.device}, its argument on {argument.device}")
            return ctypes.c_void_p(argument.data_ptr())
        if argument is None:
            return ctypes.c_void_p(None)
        if isinstance(argument, np.generic):
            argument = argument.tobytes()
        if isinstance(argument, bytes):
            return ctypes.create_string_buffer(argument, len(argument))
        raise LaunchError(
            f"{self.variant}: give {argument!r} ({type(argument).__name__}) an exact type, as np.int32(...)"
        )


def load(variant: KernelVariant, device: int | None = None, artefact: Artefact | None = None) -> Kernel:
    """The kernel on a device (torch's current one by default), compiled and loaded once per process. `artefact`: the
    variant's, where it has been read or compiled.

    Load before a CUDA graph is captured: loading is not allowed inside. Raises CompileError, CacheDirectoryError,
    CupyMissingError, or UnsupportedArchError when the device is of another architecture.
    """
    index = torch.cuda.current_device() if device is None else device
    kernel = _loaded.get((variant, index))
    if kernel is not None:
        return kernel
    capability = torch.cuda.get_device_capability(index)
    if not runs_on(variant.arch, capability):
        raise UnsupportedArchError(
            f"{variant} cannot run on cuda:{index}, a GPU of compute capability {capability[0]}.{capability[1]}"
        )
    artefact = artefact or default_cache().get(variant).artefact
    with _setting_up:
        kernel = _loaded.get((variant, index))
        if kernel is None:
            kernel = _loaded[variant, index] = place(variant, artefact, index)
    return kernel


def place(variant: KernelVariant, artefact: Artefact, device: int) -> Kernel:
    """An artefact of the variant, loaded on a device."""
    driver = drivers.driver()
    with torch.cuda.device(device):
        context = driver.primary_context(device)
        driver.set_context(context)
        function = driver.load(artefact.cubin, variant.kernel)
    loaded = LoadedKernel(driver, function, context, driver.most_smem(device))
    return Kernel(variant, device, artefact.report, loaded, torch._C._cuda_getCurrentRawStream)
