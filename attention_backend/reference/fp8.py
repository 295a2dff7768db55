"""Attention at 8 bits (e4m3) in plain torch: the arithmetic of the Hopper FP8 forward, number for number if it can be.

Queries and keys are rotated by random signs and a Hadamard matrix (QuIP, FlashAttention-3 section 3.3), which leaves
products as they are and spreads outliers; queries are scaled per row, keys per tile, values per channel; probabilities
are rounded to e4m3 before they meet the values, and summed as rounded or not (`summed_by_product`). Products are added
exactly here; the tensor cores cut each to 13 bits below the largest that it is added to.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attention_backend.heuristics.fp8 import fp8_config, summed_by_product

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST = 1e-8  # a row of zeros has a scale, too; the product of two is still above zero
#: Bit d set: element d is negated before the Hadamard transform. 256 random bits, once.
SIGN_BITS = 0x3365093AE54FD35EA7F758F66C361860D1385720A6177031DAE16EB4B010350B
#: Values of 32 keys as the tensor cores want them: slot s holds key KEY_ORDER[s]. A thread of a warpgroup holds scores
#: of keys 8j + 2c and 8j + 2c + 1 (c = lane % 4), and must hand over probabilities 4c .. 4c + 3 and 16 + 4c .. + 3.
KEY_ORDER = tuple(slot // 16 * 16 + slot % 4 // 2 * 8 + slot % 16 // 4 * 2 + slot % 2 for slot in range(32))

#: A probability is 2^(exponent - stabiliser + OFFSET). The stabiliser is the row's maximum when it last grew by more
#: than THRESHOLD, so probabilities stay under 448.
OFFSET, THRESHOLD = 7.0, 1.75


@dataclass(frozen=True, slots=True)
class Quantized:
    """e4m3 tensors, shaped as they came, and what they are multiplied by.

    q_scale `[batch, num_heads, seqlen_q]` (with softmax_scale * log2 e), k_scale `[batch, num_kv_heads, k_tiles]`,
    v_scale `[batch, num_kv_heads, head_dim]`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor


def signs(head_dim: int) -> Tensor:
    return torch.tensor([-1.0 if SIGN_BITS >> d & 1 else 1.0 for d in range(head_dim)])


def rotate(x: Tensor) -> Tensor:
    """Signs, then the Hadamard matrix of +-1 along the last dimension: float32, longer by sqrt(head_dim).

    Columns come in the order in which the kernel's exchanges leave them (quantize_fp8.cuh): in each 64 of them place
    8 l + i holds column 8 (i ^ l) + l. Queries' and keys' are the same, so scores are as they were.
    """
    head_dim = x.shape[-1]
    x = x.float() * signs(head_dim).to(x.device)
    step = 1
    while step < head_dim:
        low, high = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x = torch.stack((low + high, low - high), -2).flatten(-3)
        step *= 2
    place = torch.arange(head_dim, device=x.device)
    return x[..., place // 64 * 64 + (place // 8 % 8 ^ place % 8) * 8 + place // 8 % 8]


def round_to(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """x in e4m3 such that `amax` (broadcast) becomes the largest number; and the scale that undoes it."""
    amax = amax.clamp(min=SMALLEST)
    factor = torch.full_like(amax, LARGEST) / amax  # not 448 / amax, which torch rounds twice
    return (x.float() * factor).to(E4M3), amax / LARGEST


def quantize(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, block_n: int, *, hadamard: bool) -> Quantized:
    """q `[batch, seqlen_q, num_heads, head_dim]`, k, v `[batch, seqlen_k, num_kv_heads, head_dim]`, none empty."""
    norm = q.shape[-1] ** -0.5 if hadamard else 1.0
    q, k = (rotate(q), rotate(k)) if hadamard else (q.float(), k.float())
    q8, q_scale = round_to(q, q.abs().amax(-1, keepdim=True))
    tiles = -(-k.shape[1] // block_n)
    padded = torch.nn.functional.pad(k, (0, 0, 0, 0, 0, tiles * block_n - k.shape[1])).unflatten(1, (tiles, block_n))
    k8, k_scale = round_to(padded, padded.abs().amax((2, 4), keepdim=True))
    v8, v_scale = round_to(v, v.float().abs().amax(1, keepdim=True))
    return Quantized(
        q8,
        k8.flatten(1, 2)[:, : k.shape[1]],
        v8,
        (q_scale.squeeze(-1) * norm * (softmax_scale * 1.4426950408889634)).transpose(1, 2),
        (k_scale.flatten(2) * norm).transpose(1, 2),
        v_scale.squeeze(1),
    )


def attention(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, *, causal: bool, hadamard: bool
) -> tuple[Tensor, Tensor]:
    """(out shaped like q, lse float32 `[batch, num_heads, seqlen_q]`), tile by tile from the last key to the first."""
    batch, rows, num_heads, head_dim = q.shape
    keys, group = k.shape[1], num_heads // k.shape[2]
    top = torch.full((batch, num_heads, rows), -torch.inf, device=q.device)
    total, acc = torch.zeros_like(top), torch.zeros(batch, num_heads, rows, head_dim, device=q.device)
    if q.numel() == 0 or k.numel() == 0:
        return torch.zeros_like(q, memory_format=torch.contiguous_format), top
    block_n = fp8_config(head_dim).block_n
    x = quantize(q, k, v, softmax_scale, block_n, hadamard=hadamard)
    q8, k8, v8 = x.q.float().transpose(1, 2), *(_heads(t, group) for t in (x.k, x.v))
    k_scale = x.k_scale.repeat_interleave(group, 1)
    last_key = torch.arange(rows, device=q.device)[:, None] + (keys - rows if causal else keys)
    for tile in reversed(range(x.k_scale.shape[-1])):
        held = slice(tile * block_n, min((tile + 1) * block_n, keys))
        exponents = q8 @ k8[:, :, held].transpose(2, 3) * (x.q_scale * k_scale[:, :, tile, None])[..., None]
        hidden = torch.arange(held.start, held.stop, device=q.device) > last_key
        exponents = exponents.masked_fill(hidden, -torch.inf)
        largest = exponents.amax(-1)
        new_top = torch.where(largest > top + THRESHOLD, largest, top)
        correction = torch.where(new_top == top, 1.0, torch.exp2(top - new_top))
        shift = OFFSET - new_top.masked_fill(new_top == -torch.inf, 0.0)
        p = torch.exp2(exponents + shift[..., None])
        rounded = p.to(E4M3).float()
        total = total * correction + (rounded if summed_by_product(head_dim) else p).sum(-1)
        acc = acc * correction[..., None] + rounded @ v8[:, :, held]
        top = new_top
    empty = top == -torch.inf
    factor = torch.where(empty, 0.0, 1.0 / total)
    out = acc * factor[..., None] * x.v_scale.repeat_interleave(group, 1)[:, :, None]
    lse = torch.where(empty, -torch.inf, (top - OFFSET + total.log2()) * 0.6931471805599453)
    return out.transpose(1, 2).to(q.dtype).contiguous(), lse


def _heads(x: Tensor, group: int) -> Tensor:
    """e4m3 `[batch, keys, num_kv_heads, head_dim]` -> float32 `[batch, num_heads, keys, head_dim]`"""
    return x.float().repeat_interleave(group, 2).transpose(1, 2)


def image(x: Tensor, width: int) -> Tensor:
    """Bytes `[..., rows, columns]` -> `[..., rows * columns]` as the tensor cores read them from shared memory.

    Slabs of `width` columns (32, 64 or 128); in each the 16-byte chunks of a row are swizzled by its address.
    """
    rows, columns = x.shape[-2:]
    row, column = torch.arange(rows)[:, None], torch.arange(columns)[None]
    chunk = column % width // 16 ^ row * width // 128 % (width // 16)
    offset = column // width * rows * width + row * width + chunk * 16 + column % 16
    return x.flatten(-2)[..., offset.flatten().argsort().to(x.device)]
