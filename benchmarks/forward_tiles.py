"""The Hopper forward's tiles beside each other, and peers: those whose warpgroups leave out what none of their own rows
sees, those that take each step together, of 128 and of 192 rows, and those of which two neighbours load keys for each
other.

    python benchmarks/forward_tiles.py [--head-dims 64,256] [--causal | --full] [--seqlens 512,1024,2048]
                                       [--tiles own,together,tall,cluster] [--no-peers] [--out results.json]

Cells, inputs, clock and checks are those of `benchmarks/attention.py forward`: tiles take turns on the same inputs in
the same run, the default of each cell first, and the output is compared with a float32 truth before and after it is
timed; lse is compared with the default's before. Beside them cuDNN and FlashAttention-3, where they can be imported.
The tables give the default's TFLOP/s, and how many times as fast each of the others is; the default of a cell is one of
them, timed twice, which shows the noise.

A minute on an H100. Exit code 0: timed. 1: a tile was wrong or failed. 2: no NVIDIA GPU, or an argument that names
nothing.
"""

import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

from attention_backend.heuristics.sm90 import ALONE, BY_ROWS
from attention_backend.kernels import flash_fwd_sm90
from attention_backend.kernels.hopper_variants import HopperOptions, can_be_tall, can_own_keys, can_share_keys
from attention_backend.kernels.variants import Options
from attention_backend.problem import AttentionArgs
from benchmarks.arguments import numbers, require_gpu
from benchmarks.attention_cells import Cell
from benchmarks.attention_grid import forward_cells
from benchmarks.attention_inputs import Tensors
from benchmarks.attention_registry import CUDNN, FA3, Call, Contender, Make
from benchmarks.stopwatch import Stopwatch
from benchmarks.tile_race import chosen_names, contenders, peers, race, square_cells

SECTION = "forward"
SEQLENS = (512, 1024, 2048)
_TOLERANCE = 1e-3  # of lse, beside the default's


class Tile(Enum):
    """What `flash_fwd_sm90.forward` is told: own, cluster and tall."""

    DEFAULT = None, None, None
    OWN = True, ALONE, None
    TOGETHER = False, ALONE, False
    TALL = False, ALONE, True
    CLUSTER = False, BY_ROWS, None

    def __str__(self) -> str:
        return self.name.lower()

    def forward(self, args: AttentionArgs) -> tuple[Tensor, Tensor]:
        own, cluster, tall = self.value
        return flash_fwd_sm90.forward(args, own=own, cluster=cluster, tall=tall)


def tiles_of(head_dim: int) -> list[Tile]:
    """The default first."""
    plain = HopperOptions(Options(torch.bfloat16, head_dim, head_dim))
    serving = ((Tile.OWN, can_own_keys(plain)), (Tile.TALL, can_be_tall(plain)), (Tile.CLUSTER, can_share_keys(plain)))
    others = [tile for tile, serves in serving if serves]
    return [Tile.DEFAULT, *others, Tile.TOGETHER] if others else [Tile.DEFAULT]


def contenders_of(head_dim: int, only: Sequence[str] | None) -> list[Contender]:
    """The default tile, as OURS, and the others of a head_dim, or those of them that are named."""
    return contenders(SECTION, tiles_of(head_dim), only, _of_tile)


def _of_tile(tile: Tile) -> Make:
    def make(cell: Cell, t: Tensors) -> Call:
        args = AttentionArgs(t.q, t.k, t.v, cell.head_dim**-0.5, window_right=0 if cell.causal else -1)
        compare(*(each.forward(args)[1] for each in (tile, Tile.DEFAULT)))
        return lambda: tile.forward(args)[0]

    return make


def compare(own: Tensor, default: Tensor) -> None:
    """Raises ValueError where lse is not the default tile's; NaN is not, either."""
    error = float((own - default).abs().max())
    if not error <= _TOLERANCE:
        raise ValueError(f"lse is not the default tile's: difference {error:.2e}")


def main(
    head_dims: Annotated[str, typer.Option(help="such as 64,256")] = "64,256",
    seqlens: Annotated[str, typer.Option(help="lengths; 16k tokens in all, or one sequence")] = ",".join(
        map(str, SEQLENS)
    ),
    causal: Annotated[bool | None, typer.Option("--causal/--full", help="one mask; both by default")] = None,
    tiles: Annotated[str | None, typer.Option(help="only these beside the default, by their names")] = None,
    with_peers: Annotated[bool, typer.Option("--peers/--no-peers", help="cuDNN and FlashAttention-3 too")] = True,
    rounds: Annotated[int, typer.Option(min=1, help="turns of every contender")] = 10,
    repeat_ms: Annotated[float, typer.Option(min=1, help="milliseconds of calls a turn")] = 15.0,
    warm_up_ms: Annotated[float, typer.Option(min=0, help="milliseconds of calls before a turn")] = 5.0,
    out: Annotated[Path | None, typer.Option(help="write every number to this JSON file")] = None,
    commit: Annotated[str | None, typer.Option(help="the commit, where there is no git checkout")] = None,
) -> None:
    """Times the tiles of the Hopper forward beside each other."""
    dims = numbers(head_dims)
    names = chosen_names(tiles, [tile for dim in dims for tile in tiles_of(dim)[1:]])
    cells = square_cells(forward_cells(dims, numbers(seqlens)), causal)
    watch = Stopwatch(require_gpu(), True, warm_up_ms, repeat_ms)
    ours = {dim: contenders_of(dim, names) for dim in dims}
    options = {"rounds": rounds, "warm_up_ms": warm_up_ms, "repeat_ms": repeat_ms}
    race(cells, ours, peers((CUDNN, FA3)) if with_peers else (), watch, options, out, commit)


if __name__ == "__main__":
    typer.run(main)
