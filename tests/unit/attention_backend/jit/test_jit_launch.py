"""A launch, as the driver sees it: a fake that reads configurations and parameters as cuLaunchKernelEx would."""

import ctypes
import struct
from typing import Any

import numpy as np
import pytest
import torch

from attention_backend.jit import CompileReport, Kernel, KernelVariant, LaunchError
from attention_backend.jit.driver import Driver
from attention_backend.jit.launch import LoadedKernel
from models.training.out_of_memory import is_out_of_memory

VARIANT = KernelVariant("k", "sm_90a")
FUNCTION, CONTEXT = 11, 22


class Params(ctypes.Structure):
    _fields_ = (("x", ctypes.c_void_p), ("n", ctypes.c_int), ("factor", ctypes.c_float))


class FakeLibrary:
    """Of libcuda, what a launch calls. It reads the configuration as cuda.h lays it out."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.context = CONTEXT
        self.launches: list[tuple[Any, ...]] = []  # sizes, bytes of shared memory, stream, values
        self.attributes: list[list[tuple[int, int]]] = []  # of each launch: ids in cuda.h and values
        self.smem_limits: list[int] = []
        self.fail_with = 0

    def cuCtxGetCurrent(self, context: Any) -> int:  # noqa: N802
        context._obj.value = self.context
        return 0

    def cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:  # noqa: N802
        self.context = context.value or 0
        return 0

    def cuFuncSetAttribute(self, function: ctypes.c_void_p, attribute: int, value: int) -> int:  # noqa: N802
        assert (function.value, attribute, self.context) == (FUNCTION, 8, CONTEXT)
        self.smem_limits.append(value)
        return 0

    def cuModuleLoadData(self, module: Any, cubin: bytes) -> int:  # noqa: N802
        return self.fail_with

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: None) -> int:  # noqa: N802
        if self.fail_with:
            return self.fail_with
        assert (function.value, self.context, extra) == (FUNCTION, CONTEXT, None)
        raw = ctypes.string_at(ctypes.addressof(config._obj), 56)
        *dims, smem, stream, attributes, count = struct.unpack("=7I4xQQI4x", raw)
        pointers = (ctypes.c_void_p * len(self.sizes)).from_address(parameters.value)
        values = [ctypes.string_at(pointer or 0, size) for pointer, size in zip(pointers, self.sizes, strict=True)]
        self.launches.append((tuple(dims), smem, stream, values))
        self.attributes.append(list(struct.iter_unpack("=i4xi60x", ctypes.string_at(attributes, 72 * count))))
        return 0

    def cuGetErrorName(self, code: int, name: Any) -> int:  # noqa: N802
        name._obj.value = {2: b"CUDA_ERROR_OUT_OF_MEMORY", 701: b"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"}[code]
        return 0

    def cuGetErrorString(self, code: int, words: Any) -> int:  # noqa: N802
        words._obj.value = b"too many resources"
        return 0


class Launcher:
    """A kernel with parameters of these sizes, on a fake driver and with a settable stream."""

    def __init__(self, *sizes: int, static_smem: int = 0, variant: KernelVariant = VARIANT) -> None:
        self.driver = FakeLibrary(sizes)
        self.stream = 7
        self.kernel = Kernel(
            variant,
            0,
            CompileReport(32, 0, 0, static_smem, sizes),
            LoadedKernel(Driver(self.driver), FUNCTION, CONTEXT, 232_448),
            lambda device: self.stream + device,
        )


def test_a_structure_is_passed_by_value() -> None:
    launcher = Launcher(16)
    params = Params(0xABCDEF, 3, 0.5)
    launcher.kernel((4, 2, 1), (128, 1, 1), params, 1024)
    assert launcher.driver.launches == [((4, 2, 1, 128, 1, 1), 1024, 7, [bytes(params)])]


def test_a_numpy_record_is_passed_by_value() -> None:
    launcher = Launcher(16)
    record = np.array([(0xABCDEF, 3, 0.5)], dtype=[("x", "u8"), ("n", "i4"), ("factor", "f4")])[0]
    launcher.kernel((1, 1, 1), (32, 1, 1), record)
    assert launcher.driver.launches[0][3] == [bytes(Params(0xABCDEF, 3, 0.5))]


def test_arguments_one_by_one_have_their_exact_types() -> None:
    launcher = Launcher(8, 4, 4, 16, 3)
    params = Params(1, 2, 3.0)
    launcher.kernel((1, 1, 1), (32, 1, 1), (None, np.int32(-5), np.float32(0.25), params, b"a\0b"))
    expected = [bytes(8), np.int32(-5).tobytes(), np.float32(0.25).tobytes(), bytes(params), b"a\0b"]
    assert launcher.driver.launches[0][3] == expected


@pytest.mark.parametrize("number", [1, 1.0, True])
def test_python_numbers_are_refused_as_their_width_is_unknown(number: float) -> None:
    with pytest.raises(LaunchError, match=r"exact type, as np\.int32"):
        Launcher(4).kernel((1, 1, 1), (32, 1, 1), (number,))  # type: ignore[arg-type]


def test_a_tensor_on_another_device_is_refused() -> None:
    with pytest.raises(LaunchError, match="on cuda:0, its argument on cpu"):
        Launcher(8).kernel((1, 1, 1), (32, 1, 1), (torch.zeros(1),))


@pytest.mark.parametrize("sizes", [(24,), (8,), (8, 8), ()])
def test_a_structure_of_another_size_than_the_kernels_is_refused(sizes: tuple[int, ...]) -> None:
    launcher = Launcher(*sizes)
    record = np.zeros(1, dtype=[("x", "u8"), ("y", "u8")])[0]
    for params in (Params(), record, (Params(),)):
        with pytest.raises(LaunchError, match=r"got \[16\]"):
            launcher.kernel((1, 1, 1), (32, 1, 1), params)
    assert launcher.driver.launches == []


def test_the_stream_is_asked_for_at_every_launch() -> None:
    launcher = Launcher(16)
    for stream in (7, 8, 0):
        launcher.stream = stream
        launcher.kernel((1, 1, 1), (32, 1, 1), Params())
    assert [launch[2] for launch in launcher.driver.launches] == [7, 8, 0]


@pytest.mark.parametrize("current", [0, 33])
def test_a_launch_from_another_context_or_none_uses_the_kernels_and_puts_it_back(current: int) -> None:
    launcher = Launcher(16)
    launcher.driver.context = current
    launcher.kernel((1, 1, 1), (32, 1, 1), Params(), 100_000)
    assert len(launcher.driver.launches) == 1
    assert launcher.driver.context == current
    launcher.driver.fail_with = 701
    with pytest.raises(LaunchError, match="CUDA error 701, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, too many resources"):
        launcher.kernel((1, 1, 1), (32, 1, 1), Params())
    assert launcher.driver.context == current


def test_shared_memory_above_48_kib_is_opted_into_once_per_size() -> None:
    launcher = Launcher(16, static_smem=1024)
    for smem in (47 * 1024, 47 * 1024 + 1, 100_000, 50_000, 100_000):
        launcher.kernel((1, 1, 1), (32, 1, 1), Params(), smem)
    assert launcher.driver.smem_limits == [47 * 1024 + 1, 100_000]


def test_more_shared_memory_than_the_device_has_is_refused_with_both_numbers() -> None:
    launcher = Launcher(16, static_smem=448)
    launcher.kernel((1, 1, 1), (32, 1, 1), Params(), 232_000)
    with pytest.raises(LaunchError, match=r"asks for 232001 bytes.*has 232000"):
        launcher.kernel((1, 1, 1), (32, 1, 1), Params(), 232_001)


def test_an_early_launch_asks_for_programmatic_stream_serialization() -> None:
    launcher, params = Launcher(16), Params(0xABCDEF, 3, 0.5)
    launcher.kernel((4, 2, 1), (128, 1, 1), params, 100_000, early=True)
    assert launcher.driver.launches == [((4, 2, 1, 128, 1, 1), 100_000, 7, [bytes(params)])]
    assert launcher.driver.attributes == [[(6, 1)]]  # the attribute's id in cuda.h, and "allowed"
    assert launcher.driver.smem_limits == [100_000]


def test_blocks_of_a_cooperative_launch_are_all_there_early_or_not() -> None:
    launcher = Launcher(16)
    for early in (False, True):
        launcher.kernel((132, 1, 1), (128, 1, 1), Params(), early=early, cooperative=True)
    launcher.kernel((132, 1, 1), (128, 1, 1), Params())
    assert launcher.driver.attributes == [[(2, 1)], [(6, 1), (2, 1)], []]


def test_gpus_before_hopper_start_no_kernel_early() -> None:
    launcher = Launcher(16, variant=KernelVariant("k", "sm_89"))
    launcher.kernel((1, 1, 1), (32, 1, 1), Params(), early=True)
    assert launcher.driver.attributes == [[]]


def test_a_kernel_for_which_there_is_no_memory_is_known_as_such() -> None:
    library = FakeLibrary(())
    library.fail_with = 2
    with pytest.raises(LaunchError, match="loading k: CUDA error 2") as error:
        Driver(library).load(b"cubin", "k")
    assert is_out_of_memory(error.value)
