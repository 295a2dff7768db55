"""Which kernel serves a problem: one capability table, walked in order, never a silent fallback.

Knows what kernels can do, not how they do it.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch
from torch import Tensor

from attention_backend import capabilities
from attention_backend.capabilities import (
    HALVES,
    MAX_HEAD_DIM,
    Capability,
    KernelSpec,
    any_cuda,
    first_that_serves,
    tensor_cores,
)
from attention_backend.errors import UnsupportedError
from attention_backend.heuristics import sm90
from attention_backend.heuristics.decode import DECODE_ROWS, FEW_HOPPER_ROWS
from attention_backend.kernels import device
from attention_backend.kernels.covering import covering_set
from attention_backend.kernels.rows import begins_vectors, is_expanded
from attention_backend.problem import AttentionArgs

__all__ = [
    "TABLE",
    "UnsupportedError",
    "calls",
    "count",
    "covering_set",
    "describe",
    "recording",
    "replayed",
    "run",
    "select",
]

Result = tuple[Tensor, Tensor]

_FLOATS = (torch.float32, *HALVES)
_DECODE_SEQUENCES = 1024  # what heuristics.decode leaves room for


def _nothing(args: AttentionArgs) -> Iterator[str]:  # noqa: ARG001
    yield from ()


def _same_dtype(args: AttentionArgs) -> Iterator[str]:
    if args.k.dtype != args.dtype:
        yield f"keys and values are {args.k.dtype}, queries {args.dtype}"


def _no_dropout(args: AttentionArgs) -> Iterator[str]:
    if args.dropout_threshold:
        yield "it has no dropout"


def _generic(args: AttentionArgs) -> Iterator[str]:
    yield from _same_dtype(args)
    yield from tensor_cores(args)


def _float32(args: AttentionArgs) -> Iterator[str]:
    yield from _same_dtype(args)
    yield from _no_dropout(args)
    yield from any_cuda(args)


def _float8_keys(args: AttentionArgs) -> Iterator[str]:
    if device.capability(args.q.device.index) < (8, 9):
        yield f"this GPU has no {args.k.dtype} (it needs sm_89)"
    if args.head_dim % 16 or args.head_dim_v % 16:
        yield f"head_dim {args.head_dim}/{args.head_dim_v} is not a multiple of 16, as {args.k.dtype} wants it"
    for name, x in (("k", args.k), ("v", args.v)):
        if not begins_vectors(x, 16):
            yield f"{name} is not 16-byte aligned: strides {x.stride()} in elements of one byte"


def _few_rows(args: AttentionArgs) -> Iterator[str]:
    rows = args.num_heads // args.num_kv_heads * args.seqlen_q
    if rows > DECODE_ROWS:
        yield f"a key head's group has {rows} query rows, more than {DECODE_ROWS}"
    if args.batch > _DECODE_SEQUENCES:
        yield f"there are {args.batch} sequences, more than {_DECODE_SEQUENCES}"
    if args.k.dtype != args.dtype:
        yield from _float8_keys(args)
    yield from _no_dropout(args)
    yield from tensor_cores(args)


def _float8_pages(args: AttentionArgs) -> Iterator[str]:
    if not args.paged:
        yield f"keys and values of {args.k.dtype} do not lie in pages"
    if max(args.head_dim, args.head_dim_v) > sm90.FP8_HEAD_DIM:
        yield f"head_dim {args.head_dim}/{args.head_dim_v} is above {sm90.FP8_HEAD_DIM}, over {args.k.dtype}"
    if args.softcap or args.alibi_slopes is not None:
        yield f"it has no softcap and no ALiBi over {args.k.dtype}"
    yield from _no_dropout(args)
    yield from _float8_keys(args)


def _hopper(args: AttentionArgs) -> Iterator[str]:
    if device.capability(args.q.device.index) != (9, 0):
        yield "this GPU is not a Hopper (sm_90)"
    if args.paged and args.k.shape[1] % sm90.MIN_PAGE_ROWS:
        yield f"pages of {args.k.shape[1]} tokens are not a multiple of {sm90.MIN_PAGE_ROWS}"
    for name, x in (("q", args.q), ("k", args.k), ("v", args.v)):
        if is_expanded(x):
            yield f"{name} is expanded (strides {x.stride()}), which the TMA cannot read"
    if args.k.dtype != args.dtype:
        yield from _float8_pages(args)
    yield from tensor_cores(args)


_OPTIONS = (
    "dense, varlen and paged; MHA, GQA, MQA; causal, full, windows, chunks, key padding, key mask, "
    "softcap, sinks, ALiBi, bias; Nq != Nk"
)

#: In order of preference, but see _in_order.
TABLE = (
    Capability(
        "flash_decode",
        "cuda",
        HALVES,
        f"head_dim 16 to {MAX_HEAD_DIM} by 8; up to {DECODE_ROWS} query rows a key head; {_OPTIONS}; "
        "float8_e4m3fn keys and values from sm_89; on Hopper by the TMA, but for a key mask, pages of which it brings "
        "fewer than 16 keys at a time and expanded keys, which warps copy",
        _few_rows,
    ),
    Capability(
        "flash_fwd_sm90",
        "cuda",
        HALVES,
        f"Hopper; head_dim 16 to {MAX_HEAD_DIM} by 8; pages of a multiple of {sm90.MIN_PAGE_ROWS}; {_OPTIONS}; "
        f"dropout; pages of float8_e4m3fn without softcap, ALiBi and dropout, head_dim up to {sm90.FP8_HEAD_DIM}",
        _hopper,
    ),
    Capability(
        "flash_fwd_sm80",
        "cuda",
        HALVES,
        f"head_dim 16 to {MAX_HEAD_DIM} by 8; {_OPTIONS}; dropout",
        _generic,
    ),
    Capability(
        "flash_fwd_f32",
        "cuda",
        (torch.float32,),
        f"head_dim up to {MAX_HEAD_DIM}, exact float32 arithmetic, not fast; {_OPTIONS}",
        _float32,
    ),
    Capability(
        "cpu_reference",
        "cpu",
        (torch.float64, *_FLOATS),
        f"any head_dim; {_OPTIONS}; dropout; float8_e4m3fn keys and values",
        _nothing,
    ),
)

#: Where rows are too many for one tile of the decode kernel.
_TILES_FIRST = (TABLE[1], TABLE[0], *TABLE[2:])

_calls: Counter[str] = Counter()
_recorded: ContextVar[Counter[str] | None] = ContextVar("recorded", default=None)


def select(args: AttentionArgs) -> KernelSpec:
    """The kernel that serves `args`. Raises UnsupportedError, which says what each kernel serves and refused."""
    return first_that_serves(_in_order(args), args, "attention kernel")


def _in_order(args: AttentionArgs) -> tuple[Capability, ...]:
    """The table, the faster one in front of those that serve both."""
    rows = args.num_heads // args.num_kv_heads * args.seqlen_q
    return TABLE if rows <= FEW_HOPPER_ROWS or args.k.dtype != args.dtype else _TILES_FIRST


def run(args: AttentionArgs) -> Result:
    """Attention by the selected kernel: out `args.out_shape`, lse `args.lse_shape` in float32
    (float64 for float64 inputs)."""
    return _run(select(args), args)


def run_both(few: AttentionArgs, many: AttentionArgs) -> tuple[Result, Result]:
    """Two problems of one step, of which one has few rows a sequence: beside each other where there are kernels for
    that."""
    first, second = select(few), select(many)
    if (first.kernel, second.kernel) == ("flash_decode", "flash_fwd_sm90"):
        from attention_backend.kernels import beside

        if beside.serves(few, many):
            count(first.kernel)
            count(second.kernel)
            return beside.forward(few, many)
    return _run(first, few), _run(second, many)


def _run(spec: KernelSpec, args: AttentionArgs) -> Result:
    count(spec.kernel)
    return _implementation(spec.kernel)(args)


def count(kernel: str) -> None:
    """A kernel is about to serve a call."""
    recorded = _recorded.get()
    (_calls if recorded is None else recorded)[kernel] += 1


def calls() -> dict[str, int]:
    """How often each kernel served since the process started."""
    return dict(_calls)


@contextmanager
def recording() -> Iterator[Counter[str]]:
    """The calls made inside, which are not counted: they are a CUDA graph's, to be given to `replayed` each time."""
    recorded: Counter[str] = Counter()
    token = _recorded.set(recorded)
    try:
        yield recorded
    finally:
        _recorded.reset(token)


def replayed(recorded: Counter[str]) -> None:
    """A CUDA graph has made these calls."""
    _calls.update(recorded)


@cache
def _implementation(kernel: str) -> Callable[[AttentionArgs], Result]:
    if kernel == "cpu_reference":
        from attention_backend.reference import cpu

        return cpu.forward
    if kernel == "flash_decode":
        from attention_backend.kernels import flash_decode

        return flash_decode.forward
    if kernel == "flash_fwd_sm90":
        from attention_backend.kernels import flash_fwd_sm90

        return flash_fwd_sm90.forward
    from attention_backend.kernels import flash_fwd

    return flash_fwd.forward


def describe() -> Iterator[str]:
    """The table in words, a line a kernel."""
    return capabilities.describe(TABLE)
