"""What one engine step knows about its rows and pages. Built once per step, read by every layer. Knows no model."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from attention_backend.checks import check_tensor
from attention_backend.shared_prefix import PrefixGroups


@dataclass(frozen=True, slots=True)
class KVPages:
    """One layer's KV cache. Unpacks as (k, v)."""

    k: Tensor  # [num_blocks, num_kv_heads, block_size, head_dim]
    v: Tensor  # [num_blocks, num_kv_heads, block_size, head_dim_v]
    k_scale: Tensor | None = None  # float32 [num_kv_heads], with float8_e4m3fn pages: a key is k * k_scale[head]
    v_scale: Tensor | None = None

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.k, self.v))


@dataclass(frozen=True, slots=True)
class SharedPages:
    """Which pages at the beginnings of their block tables some sequences of a step share, level by level."""

    prefixes: tuple[PrefixGroups, ...]  # rows are counted from the first sequence's first
    own_starts: Tensor  # int32 [num_seqs]: the first key of each sequence that no level covers


@dataclass(frozen=True, slots=True)
class PagedMetadata:
    """A flattened batch of sequences over a paged KV cache.

    Sequences with exactly one query row come first (`num_decodes` of them), then the others (prefills and chunks).
    Where shapes are fixed, the last decodes may be missing (`decodes_here`): others' rows follow the present ones.
    Once a layer has seen it on a CPU, the tensors' values must stay: another step is another object, as of `replace`.
    Raises TypeError for dtypes, ValueError for shapes, strides and devices: here, and so not again in every layer.
    """

    cu_seqlens_q: Tensor  # int32 [num_seqs + 1]
    seq_lens: Tensor  # int32 [num_seqs]: keys of each sequence, this step's new tokens included
    block_table: Tensor  # int32 [num_seqs, max_blocks_per_seq]
    slot_mapping: Tensor  # int64 [num_tokens]: block_id * block_size + offset of a new token; negative = do not store
    num_decodes: int
    max_seqlen_q: int  # the largest number of new tokens of a sequence
    max_seqlen_k: int  # the largest of seq_lens (an upper bound is allowed)
    decodes_here: Tensor | None = None  # bool [num_decodes, 1, 1]; those that are not have no row; None: all are
    shared_decodes: SharedPages | None = None  # of the first num_decodes sequences; None: nothing worth a pass
    shared_prefills: SharedPages | None = None  # of the others; not with decodes_here: their rows are then anywhere
    #: What was made of the above for one layer, for the next ones.
    plans: dict[Hashable, Any] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        device, num_seqs = self.seq_lens.device, self.seq_lens.shape[0] if self.seq_lens.dim() else 0
        for name, x, dtype, shape in (
            ("seq_lens", self.seq_lens, torch.int32, (num_seqs,)),
            ("cu_seqlens_q", self.cu_seqlens_q, torch.int32, (num_seqs + 1,)),
            ("block_table", self.block_table, torch.int32, (num_seqs, None)),
            ("slot_mapping", self.slot_mapping, torch.int64, (None,)),
        ):
            check_tensor(name, x, dtype, shape, x.device)  # the devices are compared here, as there is no q yet
            if x.device != device:
                raise ValueError(f"{name} is on {x.device}, seq_lens on {device}")
            if x.stride(-1) != 1 and x.shape[-1] > 1:
                raise ValueError(f"the last dimension of {name} must be contiguous, got strides {x.stride()}")
        if not 0 <= self.num_decodes <= num_seqs:
            raise ValueError(f"num_decodes must be from 0 to {num_seqs}, the number of sequences: {self.num_decodes}")
        if self.decodes_here is not None:
            check_tensor("decodes_here", self.decodes_here, torch.bool, (self.num_decodes, 1, 1), device)
            if self.shared_prefills is not None:
                raise ValueError("shared_prefills are served where every decode has its row, so not with decodes_here")
        if self.num_decodes > self.slot_mapping.shape[0]:  # missing ones too: all are computed over the first rows
            raise ValueError(f"{self.num_decodes} decodes need a row each, there are {self.slot_mapping.shape[0]}")

    @classmethod
    def of_single_rows(cls, seq_lens: Tensor, block_table: Tensor, slot_mapping: Tensor, max_seqlen_k: int) -> Self:
        """Decodes and nothing else, a row each."""
        rows = seq_lens.shape[0]
        cu_seqlens = torch.arange(rows + 1, dtype=torch.int32, device=seq_lens.device)
        return cls(cu_seqlens, seq_lens, block_table, slot_mapping, rows, 1, max_seqlen_k)

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]
