"""Sizes of a gated linear layer of many rows -> how kernels/gated_linear_sm90.cuh runs it. Pure arithmetic: no torch,
no device."""

from dataclasses import dataclass
from functools import lru_cache

#: Of a tile: rows of the input, columns of the result, columns of the input and the weights.
ROWS, OUTPUTS, DEPTH = 128, 128, 64
#: Rows and columns of a result that are copied at once.
COPIED = 64
#: Rows of a call: few are `skinny_linear`'s, or torch's.
FEWEST_ROWS = 512
#: Columns of the input. A tile of fewer may be over before the activation of the last one is (4,096 were measured).
FEWEST_COLUMNS = 1024
#: The share of its rounds of tiles that a result must fill: below, torch's products in tiles of other sizes are as
#: fast. Of Llama-3.1-8B's sizes 0.85 takes 1.10 of their time, 0.97 0.90 (H200).
LEAST_FILLED = 0.92

_STAGE_BYTES = (ROWS + 2 * OUTPUTS) * 2 * DEPTH
_SUM_BYTES = ROWS * 2 * OUTPUTS * 2


@dataclass(frozen=True, slots=True)
class GatedConfig:
    """`cluster` blocks share tiles of weights; `band`: tiles of rows of a cluster, whose columns all come in turn."""

    cluster: int = 2
    stages: int = 3
    band: int = 8

    @property
    def smem_bytes(self) -> int:
        """Tiles start at a multiple of 1,024."""
        return 1024 + self.stages * _STAGE_BYTES + _SUM_BYTES + 16 * self.stages

    def tiles(self, rows: int, width: int) -> tuple[int, int]:
        """Of a cluster: down and across a result."""
        return -(-rows // (self.cluster * ROWS)), -(-width // OUTPUTS)


@lru_cache(maxsize=1024)
def gated_config(rows: int, width: int, depth: int, num_sms: int) -> GatedConfig | None:
    """For a result `[rows, width]` of an input `[rows, depth]`. None: torch's products and the activation after them
    are as fast, or faster."""
    config = GatedConfig()
    clusters = num_sms // config.cluster
    down, across = config.tiles(rows, width)
    rounds = -(-down * across // clusters)
    filled = rows * width / (rounds * clusters * config.cluster * ROWS * OUTPUTS)
    return config if rows >= FEWEST_ROWS and depth >= FEWEST_COLUMNS and filled >= LEAST_FILLED else None
