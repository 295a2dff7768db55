"""The public function of linear layers with few rows, and its operator `longwave::skinny_linear`.

Knows when a kernel of this room is worth taking; the arithmetic elsewhere is torch's.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from attention_backend.checks import check_tensor
from attention_backend.errors import UnsupportedError
from attention_backend.heuristics.skinny import MAX_ROWS
from attention_backend.jit.errors import UnsupportedArchError
from attention_backend.kernels import device
from attention_backend.operators import operator

__all__ = ["serves", "skinny_linear"]

_DTYPES = (torch.bfloat16, torch.float16)
_VECTOR = 8  # elements that are copied at once: 16 bytes


def serves(x: Tensor, weight: Tensor) -> bool:
    """Whether `skinny_linear` runs a kernel of its own, and is the one to take: a GPU, 1 to 16 rows, no gradient.

    x `[m, k]`, weight `[n, k]`; reads no values.
    """
    return x.is_cuda and _why_not(x, weight) is None


def skinny_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, early: bool | None = None) -> Tensor:
    """x `[m, k]` times weight `[n, k]` (as torch.nn.Linear keeps it), plus bias `[n]` -> `[m, n]`.

    bfloat16 and float16, sums in float32 rounded once, m up to 16, k a multiple of 8. Results repeat bitwise, and a
    row's result depends neither on m nor on the other rows. On a CPU it is torch.nn.functional.linear.

    `early`: the kernel may start while the one queued before still runs, and read weight and bias then; nothing queued
    just before may write them. None: in CUDA graphs only, whose weights are constants.

    Raises ValueError and TypeError for what is no product, UnsupportedError for one that the kernel does not serve.
    """
    if x.dim() != 2:
        raise ValueError(f"x must be [m, k], got shape {tuple(x.shape)}")
    check_tensor("weight", weight, x.dtype, (None, x.shape[1]), x.device)
    if bias is not None:
        check_tensor("bias", bias, x.dtype, (weight.shape[0],), x.device)
    if x.is_cuda and (reason := _why_not(x, weight)):
        raise UnsupportedError(f"skinny_linear: {reason}; torch.nn.functional.linear takes any")
    return _op(x, weight, bias, early)


@operator("skinny_linear")
def _op(x: Tensor, weight: Tensor, bias: Tensor | None, early: bool | None) -> Tensor:
    if not x.is_cuda:
        return F.linear(x, weight, bias)
    from attention_backend.kernels import skinny_linear as kernels

    if early is None:
        early = torch.cuda.is_current_stream_capturing()
    return kernels.linear(x, weight, None if bias is None else bias.contiguous(), early=early)


@_op.register_fake
def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, early: bool | None) -> Tensor:  # noqa: ARG001
    return x.new_empty((x.shape[0], weight.shape[0]))


def _why_not(x: Tensor, weight: Tensor) -> str | None:
    """Why the kernel does not serve the product of two tensors on a GPU; None when it does."""
    if x.dtype not in _DTYPES or weight.dtype != x.dtype:
        return f"x and weight must be bfloat16 or float16, both, got {x.dtype} and {weight.dtype}"
    if not _has_kernels(x.dtype, x.device.index):
        return f"there is no kernel of {x.dtype} for {torch.cuda.get_device_name(x.device)}"
    if x.dim() != 2 or weight.dim() != 2 or not 1 <= x.shape[0] <= MAX_ROWS:
        return f"x must be [m, k] with m from 1 to {MAX_ROWS}, got shape {tuple(x.shape)}"
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return "there is no gradient; call it under torch.no_grad()"
    for name, t in (("x", x), ("weight", weight)):
        if t.stride(1) != 1 or t.shape[1] % _VECTOR or t.stride(0) % _VECTOR or t.data_ptr() % 16:
            return (
                f"rows are read 16 bytes at a time: {name} of shape {tuple(t.shape)}, strides {t.stride()} must have "
                f"contiguous, aligned rows of a multiple of {_VECTOR} elements"
            )
    return None


@cache
def _has_kernels(dtype: torch.dtype, index: int) -> bool:
    try:
        arch = device.arch(index)
    except UnsupportedArchError:
        return False
    return dtype == torch.float16 or arch != "sm_75"  # Turing has no bfloat16
