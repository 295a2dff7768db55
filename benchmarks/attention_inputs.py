"""Random inputs of a cell, in the layouts that contenders take. Knows no contender."""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from benchmarks.attention_cells import Cell
from benchmarks.attention_masks import SOFTCAP

BLOCK = 128  # rows and keys of a block of a sparse pattern
K_SCALE, V_SCALE = 0.5, 0.25  # of float8 keys and values: powers of two, so that bf16 holds the same numbers
_OUTLIERS, _OUTLIER_SIZE = 1e-3, 10.0  # N(0, 1) + N(0, 100) * Bernoulli(0.001), as FlashAttention-3's paper has it

_CAPPED_SIZE = 4.0  # of queries under a softcap: a cap of 50 changes scores of N(0, 16), and hardly any of N(0, 1)


@dataclass(frozen=True)
class Tensors:
    """One input set. `stored_k`: pages `[blocks, kv_heads, page, head_dim]` when there is a block table, else `k`."""

    q: Tensor
    stored_k: Tensor
    stored_v: Tensor
    block_table: Tensor | None = None  # int32 [batch, blocks of a sequence]
    lens: Tensor | None = None  # int32 [batch]: keys in use
    cu: Tensor | None = None  # int32 [batch + 1]: where each sequence begins, varlen

    @classmethod
    def random(cls, cell: Cell, device: torch.device) -> "Tensors":
        def normal(*shape: int) -> Tensor:
            x = torch.randn(shape, dtype=getattr(torch, cell.dtype), device=device)
            if cell.section == "fp8_error":
                outliers = torch.rand(shape, device=device) < _OUTLIERS
                x += outliers * _OUTLIER_SIZE * torch.randn(shape, dtype=torch.bfloat16, device=device)
            return x

        shape = (cell.kv_heads, cell.head_dim)
        if cell.section == "varlen":
            q = normal(cell.rows, cell.heads, cell.head_dim)
            cu = torch.tensor([0, *cell.lengths], device=device).cumsum(0).int()
            return cls(q, normal(cell.rows, *shape), normal(cell.rows, *shape), cu=cu)
        q = normal(cell.batch, cell.seqlen_q, cell.heads, cell.head_dim)
        if cell.option == SOFTCAP:
            q *= _CAPPED_SIZE
        if not cell.page:
            lens = torch.tensor(cell.lengths, dtype=torch.int32, device=device) if cell.lengths else None
            k, v = (normal(cell.batch, cell.seqlen_k, *shape) for _ in range(2))
            return cls(q, k, v, lens=lens)
        table = block_table(cell, device)
        blocks = int(table.max()) + 1
        k, v = (normal(blocks, cell.kv_heads, cell.page, cell.head_dim) for _ in range(2))
        if cell.section == "fp8_kv":
            k, v = as_float8(k, K_SCALE).bfloat16() * K_SCALE, as_float8(v, V_SCALE).bfloat16() * V_SCALE
        lens = torch.full((cell.batch,), cell.seqlen_k, dtype=torch.int32, device=device)
        return cls(q, k, v, table, lens)

    @cached_property
    def k(self) -> Tensor:
        """Contiguous keys `[batch, seqlen_k, kv_heads, head_dim]`, of varlen `[tokens, kv_heads, head_dim]`."""
        return self._contiguous(self.stored_k)

    @cached_property
    def v(self) -> Tensor:
        return self._contiguous(self.stored_v)

    def _contiguous(self, stored: Tensor) -> Tensor:
        if self.block_table is None:
            return stored
        return stored[self.block_table.long()].transpose(2, 3).flatten(1, 2).contiguous()

    @cached_property
    def grad_out(self) -> Tensor:
        """Random, shaped like q: what a backward begins with."""
        return torch.randn_like(self.q)

    @cached_property
    def sinks(self) -> Tensor:
        """float32 `[heads]`, random, each about as heavy as all keys, so that a result without them is wrong."""
        return math.log(self.k.shape[1]) + torch.randn(self.q.shape[2], device=self.q.device)

    @cached_property
    def slopes(self) -> Tensor:
        """float32 `[heads]`: 2^(-8 / heads) and its powers (https://arxiv.org/abs/2108.12409)."""
        heads = self.q.shape[2]
        return 2.0 ** (-8.0 * torch.arange(1, heads + 1, device=self.q.device) / heads)

    @property
    def table(self) -> Tensor:
        assert self.block_table is not None, "the cell has no pages"
        return self.block_table

    @property
    def used(self) -> Tensor:
        assert self.lens is not None, "the cell has no lengths of keys"
        return self.lens

    @cached_property
    def token_major_pages(self) -> tuple[Tensor, Tensor]:
        """Keys and values in pages `[blocks, page, kv_heads, head_dim]`: FlashAttention-3's and FlashInfer's layout."""
        return self.stored_k.transpose(1, 2).contiguous(), self.stored_v.transpose(1, 2).contiguous()

    def keys_of(self, cell: Cell, b: int) -> tuple[Tensor, Tensor]:
        """Keys and values of sequence b, `[tokens, kv_heads, head_dim]`, gathered from its pages alone."""
        if self.cu is not None:
            begin, end = self.cu[b : b + 2].tolist()
            return self.stored_k[begin:end], self.stored_v[begin:end]
        if self.block_table is None:
            return self.stored_k[b], self.stored_v[b]
        pages = self.block_table[b].long()
        k, v = (x[pages].transpose(1, 2).flatten(0, 1)[: cell.seqlen_k] for x in (self.stored_k, self.stored_v))
        return k, v


def block_table(cell: Cell, device: torch.device) -> Tensor:
    """Shuffled pages; sequences have the pages of their shared keys in common. int32 `[batch, blocks]`."""
    shared = cell.shared // cell.page
    own = -(-cell.seqlen_k // cell.page) - shared
    pages = torch.randperm(shared + cell.batch * own, device=device).int()
    return torch.cat([pages[:shared].expand(cell.batch, -1), pages[shared:].view(cell.batch, own)], dim=1).contiguous()


def as_float8(x: Tensor, scale: float) -> Tensor:
    return (x.float() / scale).to(torch.float8_e4m3fn)


@lru_cache(maxsize=4)
def block_pattern(cell: Cell) -> Tensor:
    """Which 128 x 128 blocks are visible: bool `[row blocks, key blocks]` on the CPU, the same for every head.

    Every row of blocks has the same number of them, at random, its diagonal one included; always the same pattern.
    """
    rows, keys = -(-cell.seqlen_q // BLOCK), -(-cell.seqlen_k // BLOCK)
    scores = torch.rand(rows, keys, generator=torch.Generator().manual_seed(0))
    scores.fill_diagonal_(2.0)
    pattern = torch.zeros(rows, keys, dtype=torch.bool)
    return pattern.scatter_(1, scores.topk(max(1, round(keys * cell.density)), dim=1).indices, True)
