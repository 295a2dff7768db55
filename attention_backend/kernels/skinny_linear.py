"""Launches skinny_linear_sm90: a linear layer of a few rows. Assumes that shapes were checked."""

import ctypes
from collections.abc import Iterator
from ctypes import c_int, c_void_p
from functools import cache

import torch
from torch import Tensor

from attention_backend.heuristics.skinny_linear import DEPTH, FEWEST_ROWS, MOST_ROWS, SkinnyConfig, skinny_config
from attention_backend.jit import Kernel, load
from attention_backend.jit.spec import KernelVariant
from attention_backend.kernels import device
from attention_backend.kernels.gated_activation import ACTIVATIONS
from attention_backend.kernels.params import pointer
from attention_backend.kernels.rows import DTYPES, VECTOR, element_define, is_copied, is_plain_bias, is_plain_weight
from attention_backend.kernels.tensor_map import TensorMap, tensor_map

_ARCH = "sm_90a"
_THREADS = 128 + 32


class SkinnyParams(ctypes.Structure):
    """skinny_linear_sm90.cuh"""

    _fields_ = (
        ("weights", TensorMap),
        ("rows", TensorMap),
        *((name, c_void_p) for name in ("out", "bias")),
        *((name, c_int) for name in ("num_rows", "box_rows", "width", "steps", "tiles", "gate_rows")),
        ("_alignment", ctypes.c_char * 24),
    )


def config_of(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gated: bool) -> SkinnyConfig | None:
    """The tile for x `[rows, depth]` and weight `[width, depth]`, or with `gated` `[2 width, depth]`; None: torch's
    product is as fast, or there is no kernel."""
    if not FEWEST_ROWS <= x.shape[0] <= MOST_ROWS or x.dtype not in DTYPES:
        return None
    if not is_copied(x) or not is_plain_weight(weight) or (bias is not None and not is_plain_bias(bias)):
        return None
    return _config_of_sizes(weight.shape[0], weight.shape[1], x.device.index or 0, gated)


def refuses(dtype: torch.dtype, width: int, depth: int, index: int, *, gated: bool) -> str | None:
    """Why a weight `[width, depth]` has no kernel on a device; None: it has one."""
    if dtype not in DTYPES:
        return f"it takes bfloat16 and float16, not {dtype}"
    if device.arch(index) != _ARCH:
        return f"it is a kernel for {_ARCH}, not for {device.arch(index)}"
    if _config_of_sizes(width, depth, index, gated) is None:
        return "of its sizes torch's product is as fast"
    return None


@cache
def _config_of_sizes(width: int, depth: int, index: int, gated: bool) -> SkinnyConfig | None:
    """Of a weight, whatever the rows."""
    outputs = width // 2 if gated else width
    if device.arch(index) != _ARCH or outputs % VECTOR or depth % VECTOR:
        return None
    return skinny_config(outputs, depth, device.num_sms(index), gated=gated)


def step_variants(
    dtype: torch.dtype, width: int, depth: int, activation: str | None, *, index: int
) -> Iterator[KernelVariant]:
    """The kernel of a layer on a device, if it has one: see `config_of`."""
    config = _config_of_sizes(width, depth, index, activation is not None)
    if config is not None:
        yield variant(dtype, config, activation)


@cache
def variant(dtype: torch.dtype, config: SkinnyConfig, activation: str | None = None) -> KernelVariant:
    """`activation`: of a gated layer."""
    defines = (
        element_define(dtype),
        ("COLUMNS", config.columns),
        ("CLUSTER", config.cluster),
        ("STAGES", config.stages),
        ("GATED", int(config.gated)),
        ("ACTIVATION", 0 if activation is None else ACTIVATIONS[activation]),
    )
    return KernelVariant("skinny_linear_sm90", _ARCH, defines, hot=True)


def covering_set(main: torch.dtype, other: torch.dtype, arch: str) -> Iterator[KernelVariant]:
    if arch != _ARCH:
        return
    yield variant(main, SkinnyConfig(64, 2))
    yield variant(main, SkinnyConfig(96, 2))
    yield variant(main, SkinnyConfig(256))
    yield variant(other, SkinnyConfig(64, 2))
    for activation in ACTIVATIONS:
        yield variant(main, SkinnyConfig(224, gated=True), activation)
    yield variant(other, SkinnyConfig(256, 2, gated=True), "silu")


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    config: SkinnyConfig,
    *,
    activation: str | None = None,
    early: bool = False,
    blocks: int | None = None,
) -> Tensor:
    """x `[rows, depth]`, weight `[width, depth]` -> `[rows, width]`; with `activation` weight is `[2 width, depth]`, of
    the gate and of what it multiplies, and there is no bias.

    `early`: may start before the previous kernel has ended, and reads weights then. `blocks`: at most; by default one a
    multiprocessor. Raises ValueError for what the tile cannot do: more rows than MOST_ROWS, fewer columns than a
    cluster shares out, a second tile of a cluster.
    """
    rows, depth = x.shape
    width = weight.shape[0] // 2 if config.gated else weight.shape[0]
    steps, tiles = -(-depth // DEPTH), -(-width // config.outputs)
    most = (device.num_sms(x.device.index) if blocks is None else blocks) // config.cluster
    if rows > MOST_ROWS or steps < config.cluster or (config.cluster > 1 and tiles > most):
        raise ValueError(f"{rows} rows of {depth} by {width} in {most} blocks or clusters: not with {config}")
    out = x.new_empty(rows, width)
    p = SkinnyParams(num_rows=rows, width=width, steps=steps, tiles=tiles, gate_rows=width)
    p.box_rows = -(-rows // 8) * 8  # rows of a tile that are not there are not brought, and their products not kept
    p.weights = tensor_map(weight.unsqueeze(1), config.outputs)
    p.rows = tensor_map(x.unsqueeze(1), p.box_rows)
    p.out, p.bias = out.data_ptr(), pointer(bias)
    kernel = _kernel(x.dtype, config, activation, x.device.index)
    kernel((min(tiles, most) * config.cluster, 1, 1), (_THREADS, 1, 1), p, config.smem_bytes, early=early)
    return out


@cache
def _kernel(dtype: torch.dtype, config: SkinnyConfig, activation: str | None, index: int) -> Kernel:
    return load(variant(dtype, config, activation), index)
