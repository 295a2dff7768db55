"""Sizes of a linear layer -> how kernels/skinny_linear_sm90.cuh runs it. Pure arithmetic: no torch, no device."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import ceil

from attention_backend.heuristics.sm80 import SHARED_MEMORY

#: Rows of a call. Fewer are `layer_chain`'s, where a family has chains; more have no tile.
FEWEST_ROWS, MOST_ROWS = 5, 64
#: Bytes of weights from which on they come from memory and not from the L2, whoever asks for them.
LEAST_BYTES = 16 << 20
#: Columns that a stage has of the weights' rows.
DEPTH = 128

_LEAST_STEPS = 4  # of a block: fewer are over before the ring is full
_ROW_BYTES = 2 * DEPTH
_WIDTHS = (64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 256)  # rows of weights that a tile may have: wgmma's
_CLUSTERS = (1, 2)  # of more blocks, some wait for room: 4 took 1.5 times as long, 8 no less (H200)
_MOST_WASTE = 1.2  # of weights of a block, over what each would have if all had as many
_MOST_STAGES = 6


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """Tiles of `columns` rows of the weights, whose own columns the blocks of a cluster share out."""

    columns: int
    cluster: int = 1
    gated: bool = False

    @property
    def outputs(self) -> int:
        """Columns of the result that a tile gives."""
        return self.columns // 2 if self.gated else self.columns

    @property
    def stages(self) -> int:
        room = SHARED_MEMORY["sm_90a"] - 1024 - self._sent_bytes - 8 * (2 * _MOST_STAGES + 1)
        return min(_MOST_STAGES, room // self._stage_bytes)

    @property
    def smem_bytes(self) -> int:
        """Tiles start at a multiple of 1,024."""
        return 1024 + self.stages * self._stage_bytes + self._sent_bytes + 8 * (2 * self.stages + 1)

    @property
    def _stage_bytes(self) -> int:
        return (self.columns + MOST_ROWS) * _ROW_BYTES

    @property
    def _sent_bytes(self) -> int:
        """Sums that the blocks of a cluster give each other: 16 bytes a thread and group of eight columns."""
        return self.columns // 8 * 16 * 128 if self.cluster > 1 else 0


@lru_cache(maxsize=1024)
def skinny_config(width: int, depth: int, num_sms: int, *, gated: bool = False) -> SkinnyConfig | None:
    """The tile with which a block has the fewest weights. `width`: of the result, for which there are twice as many
    rows of weights if `gated`; `depth`: of the input. None: torch's product is as fast, or faster."""
    rows = 2 * width if gated else width
    if rows * depth * 2 < LEAST_BYTES:
        return None
    best: SkinnyConfig | None = None
    fewest = _MOST_WASTE * rows / num_sms
    for cluster, columns in product(_CLUSTERS, _WIDTHS):
        if columns % ((32 if gated else 16) * cluster) or depth < _LEAST_STEPS * DEPTH * cluster:
            continue
        config = SkinnyConfig(columns, cluster, gated)
        rounds = ceil(ceil(width / config.outputs) / (num_sms // cluster))
        if (rounds == 1 or cluster == 1) and rounds * columns / cluster <= fewest:
            best, fewest = config, rounds * columns / cluster
    return best
