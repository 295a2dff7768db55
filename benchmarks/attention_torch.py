"""Peers inside torch: SDPA's cuDNN, FlashAttention-2 and memory-efficient attention; FlexAttention."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from benchmarks.attention_cells import Cell
from benchmarks.attention_inputs import Tensors
from benchmarks.attention_ours import flex_block_mask
from benchmarks.attention_registry import CUDNN, FA2, FLEX, MEM_EFF, PER_TENSOR, Call, Make, contender

_FLOAT8_MAX = 448.0
_BACKENDS = {
    CUDNN: SDPBackend.CUDNN_ATTENTION,
    FA2: SDPBackend.FLASH_ATTENTION,
    MEM_EFF: SDPBackend.EFFICIENT_ATTENTION,
}


def sdpa(backend: SDPBackend, mask_of: Callable[[Cell, Tensors], Tensor | None] = lambda _c, _t: None) -> Make:
    """SDPA on one backend alone; with a mask, `is_causal` is part of it."""

    def make(cell: Cell, t: Tensors) -> Call:
        q, k, v = (x.transpose(1, 2) for x in (t.q, t.k, t.v))
        gqa = cell.heads != cell.kv_heads
        mask = mask_of(cell, t)
        causal = mask is None and cell.causal and cell.seqlen_q > 1

        def call() -> Tensor:
            with sdpa_kernel([backend]):
                out = torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, mask, dropout_p=cell.dropout, is_causal=causal, enable_gqa=gqa
                )
            return out.transpose(1, 2)

        return call

    return make


def key_padding_mask(cell: Cell, t: Tensors) -> Tensor:
    """bool `[batch, 1, 1 or seqlen_q, seqlen_k]`, True where visible: what users of SDPA hand in."""
    key = torch.arange(cell.seqlen_k, device=t.q.device)
    used = t.used[:, None, None, None]
    if not cell.causal:
        return key < used
    row = torch.arange(cell.seqlen_q, device=t.q.device)[:, None]
    return (key >= cell.seqlen_k - used) & (key <= row)


for _name, _backend in _BACKENDS.items():
    contender(_name, "forward", "shapes", "decode", "latency", optional=_name == MEM_EFF)(sdpa(_backend))
for _name in (CUDNN, MEM_EFF):
    contender(_name, "padding")(sdpa(_BACKENDS[_name], key_padding_mask))
for _name in (CUDNN, FA2):
    contender(_name, "dropout")(sdpa(_BACKENDS[_name]))


@contender(FA2, "chunk", "paged")
def chunk(cell: Cell, t: Tensors) -> Call:
    """FlashAttention-2 on contiguous keys, the mask aligned to the last key."""
    mask = causal_lower_right(cell.seqlen_q, cell.seqlen_k)
    q, k, v = (x.transpose(1, 2) for x in (t.q, t.k, t.v))

    def call() -> Tensor:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)

    return call


def _ragged(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, cell: Cell) -> Tensor:
    most = cell.seqlen_q, cell.seqlen_k
    out: Tensor = torch.ops.aten._flash_attention_forward(q, k, v, cu_q, cu_k, *most, 0.0, cell.causal, False)[0]
    return out


def windowed(q: Tensor, k: Tensor, v: Tensor, cell: Cell) -> Tensor:
    """Causal, of the `cell.amount` keys up to the row's own."""
    most, window = (cell.seqlen_q, cell.seqlen_k), {"window_size_left": cell.amount - 1, "window_size_right": 0}
    flash = torch.ops.aten._flash_attention_forward
    out: Tensor = flash(q, k, v, None, None, *most, 0.0, True, False, **window)[0]
    return out


@contender(FA2, "varlen")
def varlen(cell: Cell, t: Tensors) -> Call:
    assert t.cu is not None
    cu = t.cu
    return lambda: _ragged(t.q, t.k, t.v, cu, cu, cell)


@contender(FA2, "padding")
def unpadded(cell: Cell, t: Tensors) -> Call:
    """FlashAttention-2 has no key mask: its users pack the keys, before the call (not timed) and, under a causal mask,
    scatter the rows afterwards (timed)."""
    used = key_padding_mask(cell, t)[:, 0, -1]  # bool [batch, seqlen_k]
    k, v = t.k[used], t.v[used]
    zero = t.used.new_zeros(1)
    cu_k = torch.cat([zero, t.used.cumsum(0).int()])
    if not cell.causal:
        cu_q = torch.arange(cell.batch + 1, dtype=torch.int32, device=t.q.device) * cell.seqlen_q
        q = t.q.flatten(0, 1)
        return lambda: _ragged(q, k, v, cu_q, cu_k, cell).view_as(t.q)
    packed, places = t.q[used], used.flatten().nonzero().squeeze(1)

    def call() -> Tensor:
        out = torch.zeros_like(t.q)
        out.view(-1, cell.heads, cell.head_dim).index_copy_(0, places, _ragged(packed, k, v, cu_k, cu_k, cell))
        return out

    return call


@contender(FLEX, "forward", optional=True)
def flex(cell: Cell, t: Tensors) -> Call:
    """FlexAttention under torch.compile; each shape compiles for some seconds, so it is asked for and kept to a few."""
    if cell.head_dim not in (64, 128) or not 2048 <= cell.seqlen_q <= 16384:
        raise NotImplementedError("timed for head_dim 64 and 128 from 2k to 16k only")
    from torch.nn.attention.flex_attention import create_block_mask

    def causal(_b: Tensor, _h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return row >= key

    device = str(t.q.device)
    mask = create_block_mask(causal, None, None, cell.seqlen_q, cell.seqlen_k, device) if cell.causal else None
    return compiled_flex(cell, t, mask)


@contender(FLEX, "block_sparse", optional=True)
def sparse_flex(cell: Cell, t: Tensors) -> Call:
    return compiled_flex(cell, t, flex_block_mask(cell, t.q.device))


ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def compiled_flex(  # type: ignore[no-untyped-def]  # mask: BlockMask | None
    cell: Cell, t: Tensors, mask, score_mod: ScoreMod | None = None, sinks: Tensor | None = None
) -> Call:
    torch._dynamo.reset()  # past its limit of shapes a function is run uncompiled, which is no peer
    attend = _flex_attention() if sinks is None else _flex_with_sinks(sinks)
    compiled = torch.compile(attend, dynamic=False)
    q, k, v = (x.transpose(1, 2) for x in (t.q, t.k, t.v))
    options = {"score_mod": score_mod, "block_mask": mask, "enable_gqa": cell.heads != cell.kv_heads}
    return lambda: compiled(q, k, v, **options).transpose(1, 2)


def _flex_attention() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


def _flex_with_sinks(sinks: Tensor) -> Callable[..., Tensor]:
    """`sinks` `[heads]` join the denominator: the result is scaled by what they leave of it."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        out, aux = flex_attention(q, k, v, **options, return_aux=AuxRequest(lse=True))
        assert aux.lse is not None
        return (out * torch.sigmoid(aux.lse - sinks[:, None])[..., None]).to(out.dtype)

    return attend


@contender(PER_TENSOR, "fp8_error")
def per_tensor_float8(cell: Cell, t: Tensors) -> Call:
    """float8 with one scale a tensor, the probabilities in float8 too, all sums exact: the plain way to use float8."""
    q, k, v = (_rounded(x.float()).transpose(1, 2) for x in (t.q, t.k, t.v))

    def call() -> Tensor:
        scores = q @ k.mT * cell.head_dim**-0.5
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        out = _rounded(weights) @ v / weights.sum(-1, keepdim=True)
        return out.transpose(1, 2).to(t.q.dtype)

    return call


def _rounded(x: Tensor) -> Tensor:
    """To float8_e4m3fn by one scale for all of x, and back."""
    scale = x.abs().amax() / _FLOAT8_MAX
    return (x / scale).to(torch.float8_e4m3fn).float() * scale
