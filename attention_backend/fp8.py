"""The FP8 forward, asked for by name: `flash_attn_fp8_func`. Nothing else in this room ever rounds to 8 bits."""

from collections.abc import Iterator

import torch
from torch import Tensor

from attention_backend.capabilities import HALVES, MAX_GRID
from attention_backend.checks import check_args
from attention_backend.errors import UnsupportedError
from attention_backend.heuristics.fp8 import HEAD_DIMS
from attention_backend.interface import default_scale
from attention_backend.operators import operator
from attention_backend.problem import AttentionArgs
from attention_backend.reference import fp8 as reference

#: What is served, for errors and documentation.
SERVES = (
    "bfloat16 and float16, head_dim 64, 128 or 256 (keys and values alike), dense [batch, seqlen, heads, head_dim], "
    "causal or full, Nq != Nk, MHA, GQA and MQA, without gradients, on a Hopper GPU (sm_90) or, emulated, on the CPU"
)


@operator("fp8_attention")
def fp8_attention_op(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, hadamard: bool
) -> tuple[Tensor, Tensor]:
    """Checked arguments of `flash_attn_fp8_func` -> (out, lse)."""
    if q.device.type == "cuda":
        from attention_backend.kernels import flash_fwd_fp8_sm90

        return flash_fwd_fp8_sm90.forward(q, k, v, softmax_scale, causal=causal, hadamard=hadamard)
    return reference.attention(q, k, v, softmax_scale, causal=causal, hadamard=hadamard)


@fp8_attention_op.register_fake
def _fp8_attention_fake(
    q: Tensor,
    k: Tensor,  # noqa: ARG001
    v: Tensor,  # noqa: ARG001
    softmax_scale: float,  # noqa: ARG001
    causal: bool,  # noqa: ARG001
    hadamard: bool,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, num_heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, num_heads, seqlen_q), dtype=torch.float32)


def flash_attn_fp8_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    hadamard: bool = True,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with queries, keys, values and probabilities rounded to e4m3 on the way: out shaped like q.

    q `[batch, seqlen_q, num_heads, head_dim]`, k, v `[batch, seqlen_k, num_kv_heads, head_dim]`; causal is bottom-right
    aligned. `hadamard` rotates queries and keys first, which keeps outliers from costing the others their precision.
    lse is float32 `[batch, num_heads, seqlen_q]`, up to head_dim 128 of the probabilities as rounded. Forward only.

    Raises ValueError and TypeError for arguments that make no problem, UnsupportedError for one that is not served.
    """
    scale = default_scale(softmax_scale, q)
    check_args(AttentionArgs(q, k, v, scale, window_right=0 if causal else -1))
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    for refusal in _refusals(q, v, needs_grad):
        raise UnsupportedError(f"FP8 attention: {refusal}. It serves {SERVES}")
    out, lse = fp8_attention_op(q, k, v, scale, causal, hadamard)
    return (out, lse) if return_lse else out


def _refusals(q: Tensor, v: Tensor, needs_grad: bool) -> Iterator[str]:
    if q.dtype not in HALVES:
        yield f"the tensors are {q.dtype}"
    if q.shape[-1] != v.shape[-1] or q.shape[-1] not in HEAD_DIMS:
        yield f"head_dim is {q.shape[-1]}/{v.shape[-1]}"
    if q.shape[0] > MAX_GRID:
        yield f"batch {q.shape[0]} is above {MAX_GRID}"
    if needs_grad:
        yield "a gradient is asked for: use torch.no_grad(), or detach the tensors"
    if q.device.type == "cuda" and torch.cuda.get_device_capability(q.device) != (9, 0):
        yield "this GPU is not a Hopper"
    if q.device.type not in ("cuda", "cpu", "meta"):
        yield f"the tensors are on {q.device.type}"
