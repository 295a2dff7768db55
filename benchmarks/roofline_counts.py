"""What attention costs on paper: FLOPs, and bytes between HBM and the chip when no intermediate stays in the L2.

16-bit elements, as many key heads as query heads. Formulas of Dao et al., arXiv 2205.14135, section 3 and Theorem 2.
"""

from dataclasses import dataclass

ELEMENT = 2  # bytes of a bfloat16
#: Rabe & Staats' own defaults (arXiv 2112.05682, listing 1): rows and keys that are computed at a time.
RABE_STAATS_ROWS, RABE_STAATS_KEYS = 1024, 4096
#: Of the block-sparse case: as many documents of one length, whose tokens see only each other.
DOCUMENTS = 4


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
        """What softmax attention needs: two products, half of them under a causal mask."""
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


@dataclass(frozen=True, slots=True)
class Work:
    """What one call costs on paper."""

    flops: int  # what its formula needs
    least_bytes: int  # inputs read once, outputs written once
    flops_done: int = 0  # what the method does; 0: no more than the formula needs
    counted_bytes: int = 0  # with what it keeps in HBM on the way; 0: nothing

    @property
    def done(self) -> int:
        return self.flops_done or self.flops

    @property
    def counted(self) -> int:
        return self.counted_bytes or self.least_bytes


def forward_work(shape: Shape) -> Work:
    """Of a method that keeps its scores on the chip."""
    return Work(shape.flops, shape.least_bytes)


def standard_work(shape: Shape) -> Work:
    return Work(shape.flops, shape.least_bytes, shape.flops_unmasked, standard_bytes(shape))


def rabe_staats_work(shape: Shape) -> Work:
    return Work(shape.flops, shape.least_bytes, counted_bytes=rabe_staats_bytes(shape))


def float32_work(shape: Shape) -> Work:
    return Work(shape.flops, 2 * shape.least_bytes)


def fp8_work(shape: Shape) -> Work:
    """Queries, keys and values are written as bytes of e4m3 and read again."""
    quantised = shape.heads * shape.head_dim * (shape.rows + 2 * shape.keys)
    return Work(shape.flops, shape.least_bytes, counted_bytes=shape.least_bytes + 2 * quantised)


def fp8_keys_work(shape: Shape) -> Work:
    """Keys and values have one byte an element."""
    return Work(shape.flops, shape.least_bytes - shape.heads * shape.head_dim * 2 * shape.keys)


def documents_work(shape: Shape) -> Work:
    """A DOCUMENTS-th of the scores."""
    return Work(shape.flops // DOCUMENTS, shape.least_bytes)


def linear_work(shape: Shape) -> Work:
    """A state of head_dim^2 a head, with which every key and every query makes one product; causal, the kernels read
    keys and values once more."""
    twice = shape.least_bytes + shape.heads * shape.head_dim * 2 * shape.keys * ELEMENT * shape.causal
    return Work(4 * shape.heads * shape.rows * shape.head_dim**2, shape.least_bytes, counted_bytes=twice)


def backward_work(shape: Shape) -> Work:
    """Five products where forward has two; q, k, v, the output and its gradient are read, dq, dk and dv written."""
    row = shape.heads * shape.head_dim * ELEMENT
    return Work(shape.flops * 5 // 2, row * 4 * (shape.rows + shape.keys))


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
