"""Which kernel serves a problem's gradients: one capability table, walked in order, never a silent fallback.

As `dispatch` for the forward. Knows what kernels can do, not how they do it.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from attention_backend import capabilities, dispatch
from attention_backend.capabilities import HALVES, Capability, KernelSpec
from attention_backend.heuristics.sm80 import HEAD_DIM_TILES
from attention_backend.heuristics.sm80_backward import FEWEST_KEYS
from attention_backend.kernels import device
from attention_backend.kernels.rows import is_expanded
from attention_backend.problem import AttentionArgs
from attention_backend.reference.gradients import Gradients

__all__ = ["TABLE", "Gradients", "describe", "implementation", "run", "select"]

Implementation = Callable[[AttentionArgs, Tensor, Tensor, Tensor, Tensor | None], Gradients]

_ALL = (torch.float64, torch.float32, *HALVES)


def _hopper(args: AttentionArgs) -> Iterator[str]:
    if device.capability(args.q.device.index) != (9, 0):
        yield "this GPU is not a Hopper (sm_90)"
    if args.k.dtype != args.dtype:
        yield f"keys and values are {args.k.dtype}, queries {args.dtype}"
    if args.num_heads * (capabilities.MAX_HEAD_DIM // 64) > capabilities.MAX_GRID:
        yield f"num_heads {args.num_heads} is too large"
    for name, x in (("q", args.q), ("k", args.k), ("v", args.v)):
        if is_expanded(x):
            yield f"{name} is expanded (strides {x.stride()}), which the TMA cannot read"
    yield from _on_tensor_cores(args)


def _generic(args: AttentionArgs) -> Iterator[str]:
    keys = args.k.shape[1] if args.cu_seqlens_k is None else args.max_seqlen_k
    if keys > capabilities.MAX_GRID * FEWEST_KEYS:
        yield f"{keys} keys of a sequence are above {capabilities.MAX_GRID * FEWEST_KEYS}"
    yield from _on_tensor_cores(args)


def _on_tensor_cores(args: AttentionArgs) -> Iterator[str]:
    if args.paged:
        yield "keys lie in pages"
    if args.bias is not None:
        yield "it has no gradient of a bias"
    yield from capabilities.tensor_cores(args)


def _nothing(args: AttentionArgs) -> Iterator[str]:  # noqa: ARG001
    yield from ()


_OPTIONS = (
    "dense and varlen; MHA, GQA, MQA; causal, full, windows, chunks, key padding, key mask, softcap, sinks, ALiBi, "
    "dropout; Nq != Nk; deterministic when asked"
)

#: In order of preference.
TABLE = (
    Capability(
        "flash_bwd_sm90",
        "cuda",
        HALVES,
        f"Hopper; head_dim 16 to {HEAD_DIM_TILES[-1]} by 8; {_OPTIONS}",
        _hopper,
    ),
    Capability("flash_bwd_sm80", "cuda", HALVES, f"head_dim 16 to {HEAD_DIM_TILES[-1]} by 8; {_OPTIONS}", _generic),
    Capability(
        "tiled_torch",
        "cuda",
        _ALL,
        "any head_dim, bias and pages too; exact, in plain torch, waits for the device and is not fast",
        _nothing,
    ),
    Capability("cpu_reference_backward", "cpu", _ALL, f"any head_dim; {_OPTIONS}; bias, pages", _nothing),
)


def select(args: AttentionArgs) -> KernelSpec:
    """The kernel that serves the gradients of `args`. Raises UnsupportedError, which says what each serves."""
    return capabilities.first_that_serves(TABLE, args, "backward kernel")


def run(
    args: AttentionArgs,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None = None,
    kernel: str | None = None,
) -> Gradients:
    """Gradients by the selected kernel, or by the one that is named.

    `out` and `lse` are forward's, `grad_out` is shaped like out, `grad_lse` like lse. The same bits every time with
    `args.deterministic`, and where torch.use_deterministic_algorithms asks for that. Raises UnsupportedError when
    nothing serves the problem, or not the kernel that is named.
    """
    if torch.are_deterministic_algorithms_enabled() and not args.deterministic:
        args = replace(args, deterministic=True)
    table = TABLE if kernel is None else tuple(line for line in TABLE if line.kernel == kernel)
    if not table:
        raise ValueError(f"there is no backward kernel {kernel!r}: give one of {', '.join(x.kernel for x in TABLE)}")
    spec = capabilities.first_that_serves(table, args, "backward kernel" if kernel is None else kernel)
    dispatch.count(spec.kernel)
    return implementation(spec.kernel)(args, out, lse, _in_rows(grad_out), grad_lse)


def implementation(kernel: str) -> Implementation:
    """The launcher of a line of the table. It assumes a problem that the line serves, and a grad_out in whole rows."""
    if kernel == "flash_bwd_sm90":
        from attention_backend.kernels import flash_bwd_sm90

        return flash_bwd_sm90.backward
    if kernel == "flash_bwd_sm80":
        from attention_backend.kernels import flash_bwd

        return flash_bwd.backward
    from attention_backend.reference import gradients

    return gradients.backward


def describe() -> Iterator[str]:
    """The table in words, a line a kernel."""
    return capabilities.describe(TABLE)


def _in_rows(x: Tensor) -> Tensor:
    """With rows that begin at 16 bytes, none of them expanded, as `out.sum().backward()` sends them."""
    strides = [stride for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1]
    plain = x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(s > 0 and s % 8 == 0 for s in strides)
    return x if plain else x.contiguous()
