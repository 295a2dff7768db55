"""The roofline's calls of our kernels, and what their results are held to.

A call returns its outputs; those of attention are `[1, rows, heads, head_dim]`. Inputs are `[1, rows or keys, heads,
head_dim]`.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from attention_backend import backward, block_patterns, dispatch
from attention_backend.block_sparse import block_sparse_attention
from attention_backend.fp8 import flash_attn_fp8_func
from attention_backend.linear import linear_attention
from attention_backend.problem import AttentionArgs
from attention_backend.reference import linear as linear_reference
from attention_backend.shared_prefix import shared_prefix_attention
from benchmarks.roofline_counts import DOCUMENTS, Shape

Outputs = tuple[Tensor, ...]
Call = Callable[[], Outputs]
Tensors = tuple[Tensor, Tensor, Tensor]  # q, k, v

_PAGE = 64
_LINEAR_CHUNK = 1024  # of the reference
_KEY_SCALE = 2.0**-6  # of e4m3 keys and values: 448 * 2^-6 is beyond any normal number here
_GRADIENT_SEED = 11


class NotServedError(Exception):
    """A method does not serve a shape, or not on this GPU; the text says why."""


def problem(shape: Shape, tensors: Tensors) -> AttentionArgs:
    return AttentionArgs(*tensors, shape.head_dim**-0.5, window_right=0 if shape.causal else -1)


def softmax_attention(shape: Shape, tensors: Tensors) -> Outputs:
    """By torch."""
    q, k, v = (x.transpose(1, 2) for x in tensors)
    return (F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal).transpose(1, 2),)


def generic(shape: Shape, tensors: Tensors) -> Call:
    from attention_backend.kernels import flash_fwd

    args = problem(shape, tensors)
    return lambda: flash_fwd.forward(args)[:1]


def float32(shape: Shape, tensors: Tensors) -> Call:
    q, k, v = (x.float() for x in tensors)
    args = problem(shape, (q, k, v))
    return lambda: dispatch.run(args)[:1]


def hopper(shape: Shape, tensors: Tensors) -> Call:
    """By dispatch, as users call it."""
    args = problem(shape, tensors)
    kernel = dispatch.select(args).kernel
    if kernel != "flash_fwd_sm90":
        raise NotServedError(f"dispatch chooses {kernel} here")
    return lambda: dispatch.run(args)[:1]


def fp8(shape: Shape, tensors: Tensors) -> Call:
    """With the rotation and the rounding of its inputs."""
    return lambda: (_tensor(flash_attn_fp8_func(*tensors, causal=shape.causal)),)


def decode(shape: Shape, tensors: Tensors) -> Call:
    """One query row on the keys."""
    from attention_backend.kernels import flash_decode

    args = problem(shape, tensors)
    return lambda: flash_decode.forward(args)[:1]


def decode_fp8(shape: Shape, tensors: Tensors) -> Call:
    """The same on keys and values of e4m3."""
    from attention_backend.kernels import flash_decode

    q, k, v = tensors
    scale = torch.full((shape.heads,), _KEY_SCALE, device=q.device)
    args = AttentionArgs(
        q, _to_e4m3(k), _to_e4m3(v), shape.head_dim**-0.5, k_scale=scale, v_scale=scale
    )  # fmt: skip
    return lambda: flash_decode.forward(args)[:1]


def attention_of_e4m3(shape: Shape, tensors: Tensors) -> Outputs:
    """Softmax attention of what the bytes of keys and values stand for."""
    q, k, v = tensors
    k, v = (_to_e4m3(x).to(q.dtype) * _KEY_SCALE for x in (k, v))
    return softmax_attention(shape, (q, k, v))


def _to_e4m3(x: Tensor) -> Tensor:
    return (x.float() / _KEY_SCALE).to(torch.float8_e4m3fn)


def shared_prefix(shape: Shape, tensors: Tensors) -> Call:
    """As many requests as rows, one row each, on the same pages; none has keys of its own."""
    q, k, v = tensors
    if shape.keys % _PAGE:
        raise NotServedError(f"{shape.keys} keys fill no pages of {_PAGE}")
    pages = [x[0].unflatten(0, (-1, _PAGE)) for x in (k, v)]
    table = torch.arange(shape.keys // _PAGE, dtype=torch.int32, device=q.device)
    nothing = torch.zeros(shape.rows, 1, dtype=torch.int32, device=q.device)
    requests = q.transpose(0, 1)

    def call() -> Outputs:
        out = shared_prefix_attention(
            requests, *pages, prefix_block_table=table, prefix_len=shape.keys, suffix_block_table=nothing,
            suffix_lens=nothing[:, 0],
        )  # fmt: skip
        return (_tensor(out).transpose(0, 1),)

    return call


def documents(shape: Shape, tensors: Tensors) -> Call:
    """Block-sparse: DOCUMENTS of one length, of which no token sees another document's."""
    lengths = [shape.rows // DOCUMENTS] * DOCUMENTS
    lists = block_patterns.document_lengths(lengths, causal=shape.causal, device=tensors[0].device)
    return lambda: (_tensor(block_sparse_attention(*tensors, lists)),)


def attention_by_document(shape: Shape, tensors: Tensors) -> Outputs:
    q, k, v = (x[0].unflatten(0, (DOCUMENTS, -1)) for x in tensors)
    (out,) = softmax_attention(shape, (q, k, v))
    return (out.flatten(0, 1)[None],)


def linear(shape: Shape, tensors: Tensors) -> Call:
    return lambda: (linear_attention(*tensors, causal=shape.causal),)


def linear_truth(shape: Shape, tensors: Tensors) -> Outputs:
    q, k, v = (x.float() for x in tensors)
    return (linear_reference.forward(q, k, v, causal=shape.causal, chunk_size=_LINEAR_CHUNK),)


def backward_by(kernel: str) -> Callable[[Shape, Tensors], Call]:
    """dq, dk and dv by one of the backward kernels, with what it does before and after."""

    def make(shape: Shape, tensors: Tensors) -> Call:
        args = problem(shape, tensors)
        if kernel not in [line.kernel for line in backward.TABLE if line.refuses(args) is None]:
            raise NotServedError(f"{kernel} does not serve this here")
        out, lse = dispatch.run(args)
        grad_out = output_gradient(tensors[0])

        def call() -> Outputs:
            found = backward.run(args, out, lse, grad_out, kernel=kernel)
            return found.dq, found.dk, found.dv

        return call

    return make


def gradients(shape: Shape, tensors: Tensors) -> Outputs:
    """dq, dk and dv of softmax attention by torch."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    (out,) = softmax_attention(shape, (leaves[0], leaves[1], leaves[2]))
    return torch.autograd.grad(out, leaves, output_gradient(tensors[0]))


def output_gradient(q: Tensor) -> Tensor:
    """Random, the same at every call."""
    g = torch.Generator(q.device).manual_seed(_GRADIENT_SEED)
    return torch.empty_like(q).normal_(generator=g)


def _tensor(x: object) -> Tensor:
    """Of functions that return an lse too, when they are asked to."""
    assert isinstance(x, Tensor)
    return x
