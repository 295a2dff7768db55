"""Launches layer_chain_sm90: a decoder layer between two attentions, of few rows. Assumes that shapes were checked."""

import ctypes
from collections.abc import Iterator
from ctypes import c_float, c_int, c_uint32, c_void_p
from functools import cache

import torch
from torch import Tensor

from attention_backend.errors import UnsupportedError
from attention_backend.heuristics.layer_chain import MOST_ROWS, WARPS, ChainConfig, ChainHeads, chain_config
from attention_backend.jit import Kernel, load
from attention_backend.jit.spec import KernelVariant
from attention_backend.kernels import device, workspace
from attention_backend.kernels.chain_attention import Attending, ChainAttention, refuses_heads, takes_heads
from attention_backend.kernels.chain_store import ChainStore, Pages, Store
from attention_backend.kernels.gated_activation import ACTIVATIONS
from attention_backend.kernels.params import pointer
from attention_backend.kernels.rows import DTYPES, VECTOR, check_rows, element_define
from attention_backend.kernels.tensor_map import TensorMap, packed_columns_map

_ARCH = "sm_90a"
_PHASES = 4
_BOX_ROWS = 8
_COUNT = 4  # words that keep a count, so that vectors may follow
_SHARE = 32  # words that a block hands over of each row of a phase


class ChainParams(ctypes.Structure):
    """layer_chain_sm90.cuh"""

    _fields_ = (
        ("weights", TensorMap * _PHASES),
        *((name, c_void_p) for name in ("attended", "residual", "norm_mlp", "norm_next", "bias")),
        *((name, c_void_p) for name in ("total", "next", "words")),
        *((name, c_int) for name in ("rows", "attended_width", "width", "gated_width", "next_width")),
        *((name, c_uint32) for name in ("stages", "in_flight")),
        *((name, c_float) for name in ("eps_mlp", "eps_next")),
        ("store", ChainStore),
        ("attention", ChainAttention),
        ("_alignment", ctypes.c_char * 32),
    )


def refuses(
    where: torch.device,
    dtype: torch.dtype,
    attended_width: int,
    width: int,
    gated_width: int,
    rows: int,
    heads: ChainHeads | None = None,
) -> str | None:
    """Why so many rows of these widths have no kernel there; None: they have one. `heads`: with attention in front."""
    if dtype not in DTYPES:
        return f"it takes bfloat16 and float16, not {dtype}"
    if device.arch(where.index or 0) != _ARCH:
        return f"it is a kernel for {_ARCH}, not for {device.arch(where.index or 0)}"
    if attended_width % VECTOR or width % VECTOR or gated_width % VECTOR:
        return f"rows of {attended_width}, {width} and {gated_width} elements: it takes multiples of {VECTOR}"
    if rows > MOST_ROWS:
        return f"{rows} rows: it takes {MOST_ROWS} at most"
    if chain_config(rows, width, max(attended_width, width, gated_width), heads) is None:
        return f"{rows} rows of {max(attended_width, width, gated_width)} elements leave no room for weights"
    return None if heads is None else refuses_heads(heads, rows, device.num_sms(where.index or 0))


@cache
def variant(
    dtype: torch.dtype,
    activation: str,
    config: ChainConfig,
    *,
    unit_offset: bool,
    store: Store = Store.NOTHING,
    heads: ChainHeads | None = None,
) -> KernelVariant:
    """`stages` and what is in flight are parameters: such configurations share a kernel."""
    defines = (
        element_define(dtype),
        ("ACTIVATION", ACTIVATIONS[activation]),
        ("UNIT_OFFSET", int(unit_offset)),
        ("WARPS", config.num_warps),
        ("COLS", config.columns),
        ("BOX_ROWS", _BOX_ROWS),
        ("STORE", store.value),
        ("GROUP", 0 if heads is None else heads.group),
        ("HEAD_DIM", 0 if heads is None else heads.head_dim),
    )
    return KernelVariant("layer_chain_sm90", _ARCH, defines, hot=True)


def variants_of(
    dtype: torch.dtype,
    activation: str,
    attended_width: int,
    width: int,
    gated_width: int,
    *,
    unit_offset: bool,
    store: Store,
    heads: ChainHeads | None = None,
) -> Iterator[KernelVariant]:
    """The kernels of every number of rows that a layer of these sizes has some for: with `heads` those that begin with
    its attention, too."""
    fronts = [None] if heads is None or not takes_heads(heads) else [None, heads]
    for rows in range(1, MOST_ROWS + 1):
        for front in fronts:
            config = chain_config(rows, width, max(attended_width, width, gated_width), front)
            if config is not None:
                yield variant(dtype, activation, config, unit_offset=unit_offset, store=store, heads=front)


def covering_set(main: torch.dtype, other: torch.dtype, arch: str) -> Iterator[KernelVariant]:
    if arch != _ARCH:
        return
    for warps in WARPS:
        yield variant(main, "silu", ChainConfig(num_warps=warps), unit_offset=False, store=Store.PAGES)
    config = ChainConfig(num_warps=WARPS[0])
    yield variant(main, "silu", config, unit_offset=False)
    yield variant(main, "silu", config, unit_offset=False, store=Store.FP8_PAGES)
    yield variant(other, "silu", config, unit_offset=False, store=Store.PAGES)
    yield variant(main, "gelu_tanh", config, unit_offset=True, store=Store.PAGES)
    yield variant(main, "gelu", config, unit_offset=False)
    for heads in (ChainHeads(4, 8, 128), ChainHeads(7, 2, 64), ChainHeads(1, 32, 96)):
        yield variant(main, "silu", config, unit_offset=False, store=Store.PAGES, heads=heads)
    yield variant(other, "silu", config, unit_offset=False, heads=ChainHeads(8, 8, 128))


def layer_chain(
    attended: Tensor,
    residual: Tensor,
    out_weight: Tensor,
    norm_mlp: Tensor,
    gate_up: Tensor,
    down: Tensor,
    norm_next: Tensor,
    next_weight: Tensor,
    next_bias: Tensor | None,
    activation: str,
    eps_mlp: float,
    eps_next: float,
    *,
    unit_offset: bool,
    early: bool = False,
    pages: Pages | None = None,
    attending: Attending | None = None,
) -> tuple[Tensor, Tensor]:
    """Of up to MOST_ROWS rows; see `attention_backend.layer_chain`. Returns the next residual and the projections; with
    `pages` the turned queries `[rows, heads, head_dim]` of them, whose keys and values are stored. With `attending`
    attended is queries `[rows, heads, head_dim]`.

    `early`: may start before the previous kernel has ended, and reads weights then. Raises UnsupportedError for what
    `refuses` names, and for rows that are not 16-byte aligned.
    """
    heads = None if attending is None else attending.heads(attended.shape[1])
    attended = attended.flatten(1)
    (rows, attended_width), (width, gated_width), next_width = attended.shape, down.shape, next_weight.shape[0]
    reason = refuses(attended.device, attended.dtype, attended_width, width, gated_width, rows, heads)
    if reason is not None:
        raise UnsupportedError(reason)
    weights = (out_weight, gate_up, down, next_weight)
    check_rows(
        norm_mlp=norm_mlp, norm_next=norm_next, **dict(zip(("out", "gate_up", "down", "next"), weights, strict=True))
    )
    attended, residual = attended.contiguous(), residual.contiguous()
    check_rows(attended=attended, residual=residual)
    widest = max(attended_width, width, gated_width)
    config = chain_config(rows, width, widest, heads)
    assert config is not None, "refuses() knows"
    total = residual.new_empty(rows, width)
    out = residual.new_empty(rows, next_width) if pages is None else residual.new_empty(rows, *pages.queries)
    blocks = device.num_sms(attended.device.index)
    num_words = _num_words(rows, width, gated_width, blocks)
    if attending is not None and heads is not None:
        num_words += attending.num_words(heads, blocks)
    words = workspace.counters(residual.device, num_words)

    p = ChainParams(rows=rows, attended_width=attended_width, width=width, gated_width=gated_width)
    for phase, weight in enumerate(weights):
        p.weights[phase] = packed_columns_map(weight, config.columns, _BOX_ROWS)
    p.attended, p.residual, p.bias = attended.data_ptr(), residual.data_ptr(), pointer(next_bias)
    p.norm_mlp, p.norm_next = norm_mlp.data_ptr(), norm_next.data_ptr()
    p.total, p.next, p.next_width, p.words = total.data_ptr(), out.data_ptr(), next_width, words.data_ptr()
    p.stages, p.in_flight, p.eps_mlp, p.eps_next = config.stages, config.in_flight, eps_mlp, eps_next
    store = Store.NOTHING if pages is None else pages.store
    if pages is not None:
        p.store = pages.params
    if attending is not None:
        p.attention = attending.params(blocks)
    kernel = _kernel(attended.dtype, activation, config, attended.device.index, unit_offset, store, heads)
    smem_bytes = config.smem_bytes(rows, width, widest, heads)
    kernel((blocks, 1, 1), (config.threads, 1, 1), p, smem_bytes, early=early, cooperative=True)
    return total, out


def _num_words(rows: int, width: int, gated_width: int, blocks: int) -> int:
    """The kernel's Exchange: two elements of what phases give, sums of groups that two blocks share, one count."""
    return rows * (width + gated_width // 2) + _PHASES * blocks * rows * _SHARE + _COUNT


@cache
def _kernel(
    dtype: torch.dtype,
    activation: str,
    config: ChainConfig,
    index: int,
    unit_offset: bool,
    store: Store,
    heads: ChainHeads | None,
) -> Kernel:
    return load(variant(dtype, activation, config, unit_offset=unit_offset, store=store, heads=heads), index)
