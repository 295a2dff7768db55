"""The tensor that travels through a model in place of an attention mask: how it is laid out, made and read back.

It is int32 and 4-D, so transformers hands it on untouched, and it grows with the length, never with its square.
What the host must know is in its shape, so reading it never waits for a device. Knows no model.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attention_backend.operators import readable
from attention_backend.problem import (
    DESC_CHUNK,
    DESC_COLUMNS,
    DESC_LEFT,
    DESC_Q_OFFSET,
    DESC_RIGHT,
    DESC_START,
    DESC_STOP,
    FURTHEST,
    UNBOUNDED,
)
from models.patching.errors import UnsupportedCallError
from models.patching.rule import MaskRule

# Two layouts, told apart by dimension 1:
#   rows    [batch, 1, 1, 8 + ceil(seqlen_k / 4)]: a descriptor per row, then (only with a key mask) one byte a key
#   packed  [1, 1 + ceil(max_seqlen / 128), 1, 9 * num_seqs + 1]: a descriptor per sequence, then cu_seqlens.
#           Dimension 1 has stride 0: it costs no memory and tells the host how long the longest sequence may be.
_KEYS_PER_COLUMN = 4
_LENGTH_UNIT = 128
#: Columns that no implementation reads: what the mask was made for, compared on the CPU with what arrives.
DESC_SEQLEN_Q, DESC_SEQLEN_K = 6, 7


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A mask tensor, read back."""

    desc: Tensor  # int32 [batch or num_seqs, 8], contiguous
    key_mask: Tensor | None = None  # bool [batch, seqlen_k]
    cu_seqlens: Tensor | None = None  # int32 [num_seqs + 1]: the rows are packed sequences
    max_seqlen: int = 0


def encode_rows(
    rule: MaskRule,
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    q_offset: int | Tensor,
    kv_offset: int,
    device: torch.device,
) -> Tensor:
    """`[batch, 8]` for rows without padding; `q_offset` and `kv_offset` count from the sequence's first token."""
    desc = torch.full((batch, DESC_COLUMNS), UNBOUNDED, dtype=torch.int32, device=device)
    # Fills, not torch.tensor(): a copy from the host would wait for the device.
    desc[:, DESC_START] = 0
    desc[:, DESC_STOP] = seqlen_k
    desc[:, DESC_Q_OFFSET] = q_offset - kv_offset
    desc[:, DESC_CHUNK] = min(rule.chunk, FURTHEST)
    desc[:, DESC_SEQLEN_Q] = seqlen_q
    desc[:, DESC_SEQLEN_K] = seqlen_k
    if rule.left != UNBOUNDED:
        desc[:, DESC_LEFT] = min(rule.left, FURTHEST)
    if rule.right != UNBOUNDED:
        desc[:, DESC_RIGHT] = min(rule.right, FURTHEST)
    if rule.chunk and rule.chunk_start is not None:
        # Chunks are counted from the row's first token, which a sliding cache may have dropped. The cache holds all
        # the keys of the chunk that the first query stands in, so the next chunk border in the cache is as good.
        start = rule.chunk_start - kv_offset
        desc[:, DESC_START] = torch.where(start < 0, torch.remainder(start, rule.chunk), start).to(torch.int32)
    return desc


def pad_rows(desc: Tensor, rule: MaskRule, key_mask: Tensor) -> None:
    """Narrows START and STOP of `desc` to the first and last key in use, in place; no device wait."""
    seqlen_k = key_mask.shape[1]
    index = torch.arange(seqlen_k, dtype=torch.int32, device=key_mask.device)
    desc[:, DESC_STOP] = torch.where(key_mask, index + 1, 0).amax(-1)
    if not rule.chunk:  # with chunks, START is their origin as well and set from it
        desc[:, DESC_START] = torch.where(key_mask, index, seqlen_k).amin(-1)


def attach_key_mask(desc: Tensor, key_mask: Tensor) -> Tensor:
    """The rows layout with a key mask: int32 `[batch, 1, 1, 8 + ceil(seqlen_k / 4)]`."""
    batch, seqlen_k = key_mask.shape
    # Of our own making: a slice of one row counts as contiguous with strides that cannot be viewed as int32.
    keys = key_mask.new_zeros(batch, -(-seqlen_k // _KEYS_PER_COLUMN) * _KEYS_PER_COLUMN)
    keys[:, :seqlen_k] = key_mask
    return torch.cat([desc, keys.view(torch.int32)], dim=-1)[:, None, None, :]


def encode_packed(desc: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """The packed layout, from `[num_seqs, 8]` and `[num_seqs + 1]`."""
    units = 1 + -(-max_seqlen // _LENGTH_UNIT)
    flat = torch.cat([desc.flatten(), cu_seqlens.to(torch.int32)])
    return flat[None, None, None, :].expand(1, units, 1, -1)


def sequence_rows(rows: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:
    """`[num_seqs, 8]`: the window, causality and chunk of `rows[0]` for every sequence, over all of its own keys."""
    lengths_q, lengths_k = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    desc = rows[:1].repeat(lengths_q.shape[0], 1)
    desc[:, DESC_START] = 0
    desc[:, DESC_STOP] = lengths_k
    desc[:, DESC_Q_OFFSET] = lengths_k - lengths_q
    return desc


def is_descriptor(mask: Tensor) -> bool:
    """Whether a mask is ours, as opposed to a boolean or additive one that the caller wrote out."""
    return mask.dtype == torch.int32


def decode(mask: Tensor, batch: int, seqlen_q: int, seqlen_k: int) -> Descriptor:
    """Reads a mask tensor back, for queries `[batch, seqlen_q]` and keys `[batch, seqlen_k]`.

    Raises UnsupportedCallError when the model has changed the tensor, or its keys, on the way.
    """
    columns = mask.shape[-1]
    if mask.dim() == 4 and mask.shape[0] == 1 and mask.shape[1] > 1 and mask.shape[2] == 1 and columns % 9 == 1:
        num_seqs = columns // (DESC_COLUMNS + 1)
        flat = mask[0, 0, 0]
        desc = flat[: num_seqs * DESC_COLUMNS].view(num_seqs, DESC_COLUMNS)
        limit = min((mask.shape[1] - 1) * _LENGTH_UNIT, seqlen_q)
        return Descriptor(desc, cu_seqlens=flat[num_seqs * DESC_COLUMNS :], max_seqlen=limit)
    key_columns = -(-seqlen_k // _KEYS_PER_COLUMN)
    shaped = mask.dim() == 4 and mask.shape[1:3] == (1, 1) and mask.shape[0] in (1, batch)
    if not shaped or columns not in (DESC_COLUMNS, DESC_COLUMNS + key_columns):
        raise UnsupportedCallError(
            f"the model changed its attention mask on the way to the attention: a descriptor for {batch} rows and "
            f"{seqlen_k} keys cannot have shape {tuple(mask.shape)}"
        )
    rows = mask[:, 0, 0, :].expand(batch, columns)
    desc = rows[:, :DESC_COLUMNS].contiguous()
    if readable(desc):
        made_for = (int(desc[0, DESC_SEQLEN_Q]), int(desc[0, DESC_SEQLEN_K]))
        if made_for != (seqlen_q, seqlen_k):
            raise UnsupportedCallError(
                f"the attention mask was made for {made_for[0]} queries and {made_for[1]} keys, but "
                f"{seqlen_q} queries and {seqlen_k} keys arrived: the model changes its keys after making the mask"
            )
    if columns == DESC_COLUMNS:
        return Descriptor(desc)
    key_mask = rows[:, DESC_COLUMNS:].view(torch.bool)[:, :seqlen_k]
    return Descriptor(desc, key_mask=key_mask)


def hides_keys(desc: Tensor) -> bool:
    """Whether START and STOP leave keys out; known on the CPU only (elsewhere padding always brings a key mask)."""
    if not readable(desc):
        return False
    return bool((desc[:, DESC_START] > 0).any() | (desc[:, DESC_STOP] < desc[:, DESC_SEQLEN_K]).any())
