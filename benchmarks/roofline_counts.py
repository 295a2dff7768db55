"""What attention costs on paper: FLOPs, and bytes between HBM and the chip when no intermediate stays in the L2.

16-bit elements, as many key heads as query heads. Formulas of Dao et al., arXiv 2205.14135, section 3 and Theorem 2.
"""

from dataclasses import dataclass

ELEMENT = 2  # bytes of a bfloat16
#: Rabe & Staats' own defaults (arXiv 2112.05682, listing 1): rows and keys that are computed at a time.
RABE_STAATS_ROWS, RABE_STAATS_KEYS = 1024, 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """One call of batch 1: `rows` query rows on `keys` keys."""

    rows: int
    keys: int
    heads: int = 16
    head_dim: int = 128
    causal: bool = False

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"

    @property
    def flops(self) -> int:
        """What the formula needs: two products, half of them under a causal mask."""
        return self.flops_unmasked // (2 if self.causal else 1)

    @property
    def flops_unmasked(self) -> int:
        """What a method does that computes every score and masks afterwards."""
        return 4 * self.heads * self.rows * self.keys * self.head_dim

    @property
    def scores_bytes(self) -> int:
        return self.heads * self.rows * self.keys * ELEMENT

    @property
    def least_bytes(self) -> int:
        """q, k and v read once, the output written once: no method can move less."""
        return self.heads * self.head_dim * 2 * (self.rows + self.keys) * ELEMENT


def standard_bytes(shape: Shape) -> int:
    """Scores: written, read by the softmax; weights: written, read by the second product. Masking reads and writes."""
    passes = 6 if shape.causal else 4
    mask = shape.rows * shape.keys if shape.causal else 0  # one byte a score, read for the first head
    return shape.least_bytes + passes * shape.scores_bytes + mask


def standard_memory(shape: Shape) -> int:
    """Scores and weights are there at the same time."""
    return 2 * shape.scores_bytes + (shape.rows * shape.keys if shape.causal else 0)


def rabe_staats_bytes(shape: Shape) -> int:
    """Tensor by tensor as reference/rabe_staats.py computes it, RABE_STAATS_ROWS query rows at a time.

    Of a part's scores: the product writes, the maximum reads, the subtraction and exp read and write, the second
    product and the sum read. Of its output: the product writes, stacking and scaling read and write, the sum reads.
    """
    row_parts = -(-shape.rows // RABE_STAATS_ROWS)
    key_parts = -(-shape.keys // RABE_STAATS_KEYS)
    width = shape.heads * shape.head_dim * ELEMENT
    keys_and_values = row_parts * 2 * shape.keys * width
    queries = key_parts * 3 * shape.rows * width  # read, written scaled, read again
    outputs = key_parts * 6 * shape.rows * width + 5 * shape.rows * width  # the sum, the division, the copy to `out`
    return keys_and_values + queries + outputs + 8 * shape.scores_bytes
