"""Launches gated_linear_sm90: a gated linear layer of many rows. Assumes that shapes were checked."""

import ctypes
from collections.abc import Iterator
from ctypes import c_int
from functools import cache

import torch
from torch import Tensor

from attention_backend.heuristics.gated_linear import CONFIGS, COPIED, DEPTH, ROWS, GatedConfig, gated_config
from attention_backend.jit import Kernel, load
from attention_backend.jit.spec import KernelVariant
from attention_backend.kernels import device
from attention_backend.kernels.gated_activation import ACTIVATIONS
from attention_backend.kernels.rows import DTYPES, VECTOR, element_define, is_copied, is_plain_weight
from attention_backend.kernels.tensor_map import TensorMap, tensor_map

_ARCH = "sm_90a"
_THREADS = 3 * 128


class GatedLinearParams(ctypes.Structure):
    """gated_linear_sm90.cuh"""

    _fields_ = (
        ("rows", TensorMap),
        ("weights", TensorMap),
        ("out", TensorMap),
        *((name, c_int) for name in ("width", "steps", "row_tiles", "column_tiles", "band")),
        ("_alignment", ctypes.c_char * 44),
    )


def config_of(x: Tensor, weight: Tensor) -> GatedConfig | None:
    """How x `[rows, depth]` and weight `[2 width, depth]` are run; None: torch's products are as fast, or there is no
    kernel."""
    index, (width, depth) = x.device.index or 0, weight.shape
    if not is_copied(x) or not is_plain_weight(weight) or refuses(x.dtype, width, depth, index) is not None:
        return None
    return gated_config(x.shape[0], width // 2, depth, device.num_sms(index))


def refuses(dtype: torch.dtype, width: int, depth: int, index: int) -> str | None:
    """Why a weight `[width, depth]`, the gate's rows first, has no kernel on a device; None: it has one."""
    if dtype not in DTYPES:
        return f"it takes bfloat16 and float16, not {dtype}"
    if device.arch(index) != _ARCH:
        return f"it is a kernel for {_ARCH}, not for {device.arch(index)}"
    if not width or not depth or width % (2 * VECTOR) or depth % VECTOR:
        return f"rows are read {VECTOR} elements at a time"
    return None


def step_variants(
    dtype: torch.dtype, width: int, depth: int, activation: str | None, *, index: int
) -> Iterator[KernelVariant]:
    """The kernels of a layer `[width, depth]` on a device, if it is gated and has any: rows decide which serves."""
    if activation is not None and refuses(dtype, width, depth, index) is None:
        yield from (variant(dtype, config, activation) for config in CONFIGS)


@cache
def variant(dtype: torch.dtype, config: GatedConfig, activation: str) -> KernelVariant:
    defines = (
        element_define(dtype),
        ("STAGES", config.stages),
        ("CLUSTER", config.cluster),
        ("OUTPUTS", config.outputs),
        ("ACTIVATION", ACTIVATIONS[activation]),
    )
    return KernelVariant("gated_linear_sm90", _ARCH, defines, hot=True)


def covering_set(main: torch.dtype, other: torch.dtype, arch: str) -> Iterator[KernelVariant]:
    if arch != _ARCH:
        return
    for config in CONFIGS:
        yield from (variant(main, config, activation) for activation in ACTIVATIONS)
    yield variant(other, GatedConfig(), "silu")


def gated_linear(
    x: Tensor, weight: Tensor, config: GatedConfig, activation: str, *, blocks: int | None = None
) -> Tensor:
    """x `[rows, depth]`, weight `[2 width, depth]`, of the gate and of what it multiplies -> `[rows, width]`. `blocks`:
    at most; by default one a multiprocessor."""
    (rows, depth), width = x.shape, weight.shape[0] // 2
    out = x.new_empty(rows, width)
    p = GatedLinearParams(width=width, steps=-(-depth // DEPTH), band=config.band)
    p.row_tiles, p.column_tiles = config.tiles(rows, width)
    p.rows = tensor_map(x.unsqueeze(1), ROWS)
    p.weights = tensor_map(weight.unsqueeze(1), config.outputs)
    p.out = tensor_map(out.unsqueeze(1), COPIED)
    most = (device.num_sms(x.device.index) if blocks is None else blocks) // config.cluster
    clusters = min(most, p.row_tiles * p.column_tiles)
    kernel = _kernel(x.dtype, config, activation, x.device.index)
    kernel((clusters * config.cluster, 1, 1), (_THREADS, 1, 1), p, config.smem_bytes)
    return out


@cache
def _kernel(dtype: torch.dtype, config: GatedConfig, activation: str, index: int) -> Kernel:
    return load(variant(dtype, config, activation), index)
