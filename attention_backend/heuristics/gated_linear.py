"""Sizes of a gated linear layer of many rows -> how kernels/gated_linear_sm90.cuh runs it. Pure arithmetic: no torch,
no device."""

from dataclasses import dataclass
from functools import lru_cache

#: Of a tile: rows of the input, columns of the input and the weights.
ROWS, DEPTH = 128, 64
#: Rows and columns of a result that are copied at once.
COPIED = 64
#: Rows of a call: few are `skinny_linear`'s, or torch's.
FEWEST_ROWS = 256
#: Columns of the input. A tile of fewer may be over before the activation of the last one is (4,096 were measured).
FEWEST_COLUMNS = 1024
#: The share of its rounds of tiles that a result must fill: below, torch's products in tiles of other sizes are as
#: fast. Of Llama-3.1-8B's sizes 0.85 takes 1.10 of their time, 0.97 0.90 (H200).
LEAST_FILLED = 0.92
#: What blocks that share no weights do of what pairs do in the same time (8,192 rows, H200).
ALONE = 0.98


@dataclass(frozen=True, slots=True)
class GatedConfig:
    """`cluster` blocks share tiles of weights; `outputs`: columns of the result that a tile has; `band`: tiles of rows
    of a cluster, whose columns all come in turn."""

    cluster: int = 2
    outputs: int = 128
    stages: int = 3
    band: int = 8

    @property
    def smem_bytes(self) -> int:
        """Tiles start at a multiple of 1,024. Sums are slabs of 64 columns, of gates and of projections."""
        stage, sums = (ROWS + 2 * self.outputs) * 2 * DEPTH, ROWS * 2 * -(-self.outputs // COPIED) * COPIED * 2
        return 1024 + self.stages * stage + sums + 16 * self.stages

    def tiles(self, rows: int, width: int) -> tuple[int, int]:
        """Of a cluster: down and across a result."""
        return -(-rows // (self.cluster * ROWS)), -(-width // self.outputs)

    def filled(self, rows: int, width: int, num_sms: int) -> float:
        """The share of its rounds of tiles that a result fills."""
        clusters = num_sms // self.cluster
        down, across = self.tiles(rows, width)
        rounds = -(-down * across // clusters)
        return rows * width / (rounds * clusters * self.cluster * ROWS * self.outputs)


#: 14,336 columns are 112 tiles of 128, which fill 1.7 rounds of 66 pairs, and 128 of 112, which fill 1.94.
CONFIGS = tuple(GatedConfig(cluster, outputs) for cluster in (2, 1) for outputs in (128, 112))


@lru_cache(maxsize=1024)
def gated_config(rows: int, width: int, depth: int, num_sms: int) -> GatedConfig | None:
    """For a result `[rows, width]` of an input `[rows, depth]`. None: torch's products and the activation after them
    are as fast, or faster."""
    if rows < FEWEST_ROWS or depth < FEWEST_COLUMNS:
        return None

    def rate(config: GatedConfig) -> float:
        return config.filled(rows, width, num_sms) * (ALONE if config.cluster == 1 else 1)

    best = max(CONFIGS, key=rate)
    return best if rate(best) >= LEAST_FILLED else None
