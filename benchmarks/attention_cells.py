"""The cells of the attention benchmark: shapes, and the operations and bytes they are counted as. Knows no device."""

from dataclasses import asdict, dataclass, replace
from math import isqrt
from typing import Any

from benchmarks import attention_masks

_BYTES = 2  # of a bf16 or fp16
_TILE = 128  # rows and keys of a block; twins have lengths of whole ones


@dataclass(frozen=True)
class Cell:
    """One problem: q `[batch, seqlen_q, heads, head_dim]`, k and v `[batch, seqlen_k, kv_heads, head_dim]`.

    varlen: q, k and v `[sum(lengths), *, head_dim]`; seqlen_q and seqlen_k are the largest length.
    """

    section: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    page: int = 0  # 0: contiguous keys only
    lengths: tuple[
        int, ...
    ] = ()  # varlen: of each sequence; padding: its keys in use, the first ones (causal: the last)
    shared: int = 0  # leading keys that all sequences have in the same pages
    density: float = 1.0  # share of the 128 x 128 blocks that are visible
    dropout: float = 0.0
    dtype: str = "bfloat16"  # as torch calls it; of two bytes
    option: str = ""  # of attention_masks, on a square that is causal but for a prefix
    amount: int = 0  # the option's
    calls: int = 1  # in one CUDA graph, each on inputs of its own

    @property
    def pairs(self) -> int:
        """Visible pairs of a query row and a key, of all sequences; a causal square counts as half of it."""
        if self.section == "varlen":
            return sum(n * n for n in self.lengths) // (2 if self.causal else 1)
        if self.section == "padding":  # rows in the padding are computed under a full mask, and see nothing causally
            return sum(n * n for n in self.lengths) // 2 if self.causal else self.seqlen_q * sum(self.lengths)
        if self.option:
            return self.batch * attention_masks.pairs(self.option, self.amount, self.seqlen_q)
        pairs = self.seqlen_q * self.seqlen_k - (self.seqlen_q * self.seqlen_q // 2 if self.causal else 0)
        return round(self.batch * pairs * self.density)

    @property
    def flops(self) -> int:
        """Two products forward; five backward, as FlashAttention's papers count them."""
        products = 5 if self.section == "backward" else 2
        return 2 * products * self.pairs * self.heads * self.head_dim

    @property
    def kv_tokens(self) -> int:
        """Stored ones: shared keys once, padding included."""
        if self.section == "varlen":
            return sum(self.lengths)
        return self.shared + self.batch * (self.seqlen_k - self.shared)

    @property
    def rows(self) -> int:
        return sum(self.lengths) if self.section == "varlen" else self.batch * self.seqlen_q

    @property
    def kv_bytes(self) -> int:
        return 2 * self.kv_tokens * self.kv_heads * self.head_dim * _BYTES

    @property
    def input_bytes(self) -> int:
        return self.kv_bytes + self.rows * self.heads * self.head_dim * _BYTES

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"

    @property
    def options(self) -> str:
        """The option in words; "" where there is none."""
        return f"{self.option} {self.amount}" if self.amount else self.option

    def facts(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, facts: dict[str, Any]) -> "Cell":
        """From `facts` as JSON gives them back, or as a file has them that was written before a field existed."""
        known = {name: facts[name] for name in cls.__dataclass_fields__ if name in facts}
        return cls(**known | {"lengths": tuple(facts.get("lengths", ()))})

    def __str__(self) -> str:
        keys = f"{self.batch}x{self.seqlen_q}x{self.seqlen_k}"
        heads = str(self.heads) if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        extras = [
            f"page {self.page}" if self.page else "",
            f"{len(self.lengths)} lengths" if self.lengths else "",
            f"{self.shared} shared" if self.shared else "",
            f"density {self.density:g}" if self.density < 1 else "",
            f"dropout {self.dropout:g}" if self.dropout else "",
            self.dtype if self.dtype != "bfloat16" else "",
            self.options,
            f"{self.calls} calls" if self.calls > 1 else "",
        ]
        return " ".join([self.section, f"d={self.head_dim}", self.mask, keys, f"heads {heads}", *filter(None, extras)])


def dense_twin(cell: Cell) -> Cell:
    """The plain dense problem that a cell's speed is held against: nearly the same FLOPs, none of its difficulty.

    * varlen: equal lengths, of the mean over tokens, so that tokens and FLOPs are both the same;
    * padding: fewer sequences, all of them full;
    * chunk, paged: the square without a mask that has as many pairs;
    * block_sparse, dropout, fp8, features, patterns: the same shape without the option (of more FLOPs where a mask is
      the option).
    """
    if cell.section == "varlen":
        tokens = sum(cell.lengths)
        length = max(_TILE, round(sum(n * n for n in cell.lengths) / tokens / _TILE) * _TILE)
        batch = max(1, round(tokens / length))
        return replace(cell, section="forward", batch=batch, seqlen_q=length, seqlen_k=length, lengths=())
    if cell.section == "padding":
        square = cell.seqlen_q * cell.seqlen_k // (2 if cell.causal else 1)
        return replace(cell, section="forward", batch=max(1, round(cell.pairs / square)), lengths=())
    if cell.section in ("chunk", "paged"):
        side = max(_TILE, round(isqrt(cell.pairs // cell.batch) / _TILE) * _TILE)
        return replace(cell, section="forward", seqlen_q=side, seqlen_k=side, causal=False, page=0)
    return replace(cell, section="forward", density=1.0, dropout=0.0, option="", amount=0)
