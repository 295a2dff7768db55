"""A GPU that is none: inside `emulated_device`, kernels' launchers run on tensors of a CPU, and their kernels there.

What is real: the launchers, the planners, the parameters, the text of the kernels. What is not: the device's facts, the
driver, time. Launches run one after another, each to its end.
"""

import ctypes
import functools
import itertools
import pkgutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

import attention_backend.kernels
from attention_backend.heuristics.sm80 import SHARED_MEMORY
from attention_backend.jit import driver, launch
from attention_backend.jit.driver import Dim3
from attention_backend.jit.launch import Parameters
from attention_backend.jit.spec import KERNELS_DIR, KernelVariant, arch_for

from .compile import EmulatorError, emulated, runtime
from .driver import EmulatedDriver
from .memory import GuardedAllocations, guarded_factories

DEVICE = torch.device("cuda", 0)  # what tensors say that they are on
_MOST_THREADS = 4096  # at once, of all blocks
_ALIGNMENT = 64
_L2_BYTES = 64 << 10  # so few that a small problem does not fit


class Settings(NamedTuple):
    """`seed` decides in what order threads run and copies land."""

    capability: tuple[int, int] = (9, 0)
    num_sms: int = 4
    seed: int = 0


class EmulatedKernel:
    """`jit.launch.Kernel` on a CPU: takes the same parameters. Raises EmulatorError."""

    def __init__(self, variant: KernelVariant, settings: Settings, directory: Path = KERNELS_DIR) -> None:
        self.variant, self._settings = variant, settings
        self.max_smem = SHARED_MEMORY[variant.arch]
        self._entry = ctypes.cast(emulated(variant, directory).emulated, ctypes.c_void_p)
        self._launches = itertools.count(settings.seed)

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
        if smem_bytes > self.max_smem:
            raise EmulatorError(f"{self.variant} asks for {smem_bytes} bytes of shared memory")
        held = [_bytes(x) for x in (params if isinstance(params, tuple) else (params,))]
        pointers = (ctypes.c_void_p * len(held))(*(x.address for x in held))
        threads = block[0] * block[1] * block[2]
        at_once = (
            self._settings.num_sms if cooperative else max(1, min(2 * self._settings.num_sms, _MOST_THREADS // threads))
        )
        library = runtime()
        failed = library.emu_launch(
            self._entry, (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block), smem_bytes, pointers, at_once,
            int(cooperative), dict(self.variant.defines).get("CLUSTER", 1), next(self._launches),
        )  # fmt: skip
        if failed:
            library.emu_message.restype = ctypes.c_char_p
            raise EmulatorError(f"{self.variant}, grid {grid}, block {block}: {library.emu_message().decode()}")


class _Held(NamedTuple):
    address: int
    memory: Any


def _bytes(x: Any) -> _Held:
    """A parameter's bytes, aligned as tensor maps want them."""
    if isinstance(x, torch.Tensor):
        x = ctypes.c_void_p(x.data_ptr())
    elif x is None:
        x = ctypes.c_void_p(None)
    raw = x.tobytes() if isinstance(x, np.generic) else bytes(x)
    memory = ctypes.create_string_buffer(len(raw) + _ALIGNMENT)
    address = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
    ctypes.memmove(address, raw, len(raw))
    return _Held(address, memory)


class _Kernels(dict[tuple[KernelVariant, int], EmulatedKernel]):
    """What `jit.launch.load` finds loaded: everything."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings

    def get(self, key: tuple[KernelVariant, int], default: Any = None) -> EmulatedKernel:  # type: ignore[override]
        if key not in self:
            self[key] = EmulatedKernel(key[0], self._settings)
        return self[key]


class _Generator(torch.Generator):
    """Of the CPU, wherever its numbers are wanted."""

    def __new__(cls, device: object = None) -> "_Generator":  # noqa: ARG004
        return super().__new__(cls, device="cpu")


@contextmanager
def emulated_device(settings: Settings) -> Iterator[None]:
    """Inside, tensors of a CPU say that they are on DEVICE, and what is made there is made on the CPU, guarded (see
    `memory`)."""
    arch_for(settings.capability)
    modules = [
        import_module(f"attention_backend.kernels.{found.name}")
        for found in pkgutil.iter_modules(attention_backend.kernels.__path__)
    ]
    facts = {
        "current_device": lambda: 0,
        "get_device_capability": lambda _=None: settings.capability,
        "get_device_properties": lambda _=None: SimpleNamespace(
            multi_processor_count=settings.num_sms, L2_cache_size=_L2_BYTES
        ),
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda _=None: None,
        "current_stream": lambda _=None: SimpleNamespace(synchronize=lambda: None),
    }
    with ExitStack() as stack:
        for name, fact in facts.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, fact))
        stack.enter_context(mock.patch.object(torch._C, "_cuda_getCurrentRawStream", _default_stream, create=True))
        stack.enter_context(mock.patch.object(torch.Tensor, "is_cuda", property(lambda _: True)))
        stack.enter_context(mock.patch.object(torch.Tensor, "device", property(lambda _: DEVICE)))
        stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
        stack.enter_context(mock.patch.object(launch, "_loaded", _Kernels(settings)))
        stack.enter_context(mock.patch.object(driver, "library", EmulatedDriver))
        stack.enter_context(GuardedAllocations())
        stack.enter_context(guarded_factories())
        _forget(modules)
        stack.callback(_forget, modules)
        yield


def _default_stream(_: int | None) -> int:
    return 0


def _forget(modules: list[Any]) -> None:
    """Kernels, maps and facts that launchers keep are those of one device."""
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()
