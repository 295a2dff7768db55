"""Launches gemm_sm90: a linear layer of many rows with what follows it. Assumes that shapes were checked."""

import ctypes
from collections.abc import Iterator
from ctypes import c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from attention_backend.heuristics.gemm import COLUMNS, COPIED, DEPTH, ROWS, GemmConfig, gemm_config
from attention_backend.jit import Kernel, load
from attention_backend.jit.spec import KernelVariant
from attention_backend.kernels import device
from attention_backend.kernels.gated_activation import ACTIVATIONS
from attention_backend.kernels.rows import DTYPES, VECTOR, element_define, is_copied, is_plain_weight
from attention_backend.kernels.tensor_map import TensorMap, tensor_map

_ARCH = "sm_90a"
_THREADS = 3 * 128


class GemmParams(ctypes.Structure):
    """gemm_sm90.cuh"""

    _fields_ = (
        ("rows", TensorMap),
        ("weights", TensorMap),
        ("out", TensorMap),
        ("residual", c_void_p),
        ("residual_row", c_int64),
        *((name, c_int) for name in ("num_rows", "width", "steps", "row_tiles", "column_tiles", "band")),
        ("_alignment", ctypes.c_char * 24),
    )


def config_of(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> GemmConfig | None:
    """How x `[rows, depth]` and weight `[2 width, depth]` of a gated layer are run, or with `residual` `[rows, width]`
    weight `[width, depth]`; None: torch is as fast, or there is no kernel."""
    index, (width, depth), gated = x.device.index or 0, weight.shape, residual is None
    if not is_copied(x) or not is_plain_weight(weight) or (residual is not None and not is_copied(residual)):
        return None
    if refuses(x.dtype, width, depth, index, gated=gated) is not None:
        return None
    return gemm_config(x.shape[0], width // 2 if gated else width, device.num_sms(index), gated=gated)


def refuses(dtype: torch.dtype, width: int, depth: int, index: int, *, gated: bool) -> str | None:
    """Why a weight `[width, depth]` (`gated`: the gate's rows first) has no kernel on a device; None: it has one."""
    if dtype not in DTYPES:
        return f"it takes bfloat16 and float16, not {dtype}"
    if device.arch(index) != _ARCH:
        return f"it is a kernel for {_ARCH}, not for {device.arch(index)}"
    if width % (2 * VECTOR if gated else VECTOR) or depth % VECTOR:
        return f"rows are read {VECTOR} elements at a time"
    return None


def step_variants(
    dtype: torch.dtype, width: int, depth: int, activation: str | None, adds: bool, *, index: int
) -> Iterator[KernelVariant]:
    """The kernel of a layer `[width, depth]` on a device, if it is gated, or adds to a residual, and has one."""
    gated = activation is not None
    if (gated or adds) and refuses(dtype, width, depth, index, gated=gated) is None:
        yield variant(dtype, GemmConfig(gated), activation)


@cache
def variant(dtype: torch.dtype, config: GemmConfig, activation: str | None = None) -> KernelVariant:
    """`activation`: of a gated layer."""
    defines = (
        element_define(dtype),
        ("STAGES", config.stages),
        ("CLUSTER", config.cluster),
        ("GATED", int(config.gated)),
        ("ACTIVATION", 0 if activation is None else ACTIVATIONS[activation]),
    )
    return KernelVariant("gemm_sm90", _ARCH, defines, hot=True)


def covering_set(main: torch.dtype, other: torch.dtype, arch: str) -> Iterator[KernelVariant]:
    if arch != _ARCH:
        return
    for activation in ACTIVATIONS:
        yield variant(main, GemmConfig(gated=True), activation)
    yield variant(main, GemmConfig(gated=False))
    yield variant(other, GemmConfig(gated=True), "silu")
    yield variant(other, GemmConfig(gated=False))


def gemm(
    x: Tensor,
    weight: Tensor,
    config: GemmConfig,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    blocks: int | None = None,
) -> Tensor:
    """x `[rows, depth]` -> `[rows, width]`: with `activation` of a weight `[2 width, depth]`, of the gate and of what
    it multiplies; with `residual` `[rows, width]`, to which the product is added, of a weight `[width, depth]`.
    `blocks`: at most; by default one a multiprocessor."""
    (rows, depth), width = x.shape, weight.shape[0] // 2 if config.gated else weight.shape[0]
    out = x.new_empty(rows, width)
    p = GemmParams(num_rows=rows, width=width, steps=-(-depth // DEPTH), band=config.band)
    p.row_tiles, p.column_tiles = config.tiles(rows, width)
    p.rows = tensor_map(x.unsqueeze(1), ROWS)
    p.weights = tensor_map(weight.unsqueeze(1), COLUMNS // 2)
    p.out = tensor_map(out.unsqueeze(1), COPIED)
    if residual is not None:
        p.residual, p.residual_row = residual.data_ptr(), residual.stride(0)
    most = (device.num_sms(x.device.index) if blocks is None else blocks) // config.cluster
    clusters = min(most, p.row_tiles * p.column_tiles)
    kernel = _kernel(x.dtype, config, activation, x.device.index)
    kernel((clusters * config.cluster, 1, 1), (_THREADS, 1, 1), p, config.smem_bytes)
    return out


@cache
def _kernel(dtype: torch.dtype, config: GemmConfig, activation: str | None, index: int) -> Kernel:
    return load(variant(dtype, config, activation), index)
