"""Tiles of the Hopper backward beside each other: every one that the heuristics offer for a head_dim, and peers.

    python benchmarks/backward_tiles.py [--head-dims 64,128] [--causal | --full] [--seqlens 2048,16384]
                                        [--tiles joint-kept4+4,...] [--deterministic] [--no-peers]
                                        [--out results.json]

Cells, inputs, clock and checks are those of `benchmarks/attention.py backward`: tiles take turns on the same inputs in
the same run, the default first, and q's gradient is compared with a float32 truth before and after it is timed; those
of keys and values are compared with the default's before. Beside them cuDNN and FlashAttention-4, where they can be
imported. The tables give the default's TFLOP/s, and how many times as fast each of the others is.

A minute on an H100 once compiled. Exit code 0: timed. 1: a tile was wrong or failed.
2: no NVIDIA GPU, or an argument that names nothing.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

from attention_backend import dispatch
from attention_backend.heuristics.sm90_backward import BackwardTile, backward_tiles
from attention_backend.kernels import flash_bwd_sm90
from attention_backend.problem import AttentionArgs
from attention_backend.reference.gradients import Gradients
from benchmarks.arguments import numbers, require_gpu
from benchmarks.attention_cells import Cell
from benchmarks.attention_grid import backward_cells
from benchmarks.attention_inputs import Tensors
from benchmarks.attention_registry import CUDNN, FA4, Call, Contender, Make
from benchmarks.stopwatch import Stopwatch
from benchmarks.tile_race import chosen_names, contenders, peers, race, square_cells

SECTION = "backward"
SEQLENS = (512, 2048, 8192, 16384)
_TOLERANCE = 2e-2  # of gradients of keys and values, relative to the default's


def contenders_of(head_dim: int, only: Sequence[str] | None, *, deterministic: bool = False) -> list[Contender]:
    """The default tile, as OURS, and the others of a head_dim, or those of them that are named."""
    return contenders(SECTION, backward_tiles(head_dim, head_dim), only, partial(_of_tile, deterministic=deterministic))


def _of_tile(tile: BackwardTile, *, deterministic: bool) -> Make:
    def make(cell: Cell, t: Tensors) -> Call:
        right = 0 if cell.causal else -1
        args = AttentionArgs(t.q, t.k, t.v, cell.head_dim**-0.5, window_right=right, deterministic=deterministic)
        out, lse = dispatch.run(args)

        def gradients() -> Gradients:
            return flash_bwd_sm90.backward(args, out, lse, t.grad_out, tile=tile)

        compare(gradients(), flash_bwd_sm90.backward(args, out, lse, t.grad_out))
        return lambda: gradients().dq

    return make


def compare(own: Gradients, default: Gradients) -> None:
    """Raises ValueError where gradients of keys or values are not the default tile's; NaN is not, either."""
    for name in ("dk", "dv"):
        error = _relative(getattr(own, name), getattr(default, name))
        if not error <= _TOLERANCE:
            raise ValueError(f"{name} is not the default tile's: relative difference {error:.2e}")


def _relative(x: Tensor, y: Tensor) -> float:
    return float((x.float() - y.float()).norm() / y.float().norm())


def main(
    head_dims: Annotated[str, typer.Option(help="such as 64,128")] = "64,128",
    seqlens: Annotated[str, typer.Option(help="lengths; 16k tokens in all, or one sequence")] = ",".join(
        map(str, SEQLENS)
    ),
    causal: Annotated[bool | None, typer.Option("--causal/--full", help="one mask; both by default")] = None,
    tiles: Annotated[str | None, typer.Option(help="only these beside the default, by their names")] = None,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="sums that repeat bitwise")] = False,
    with_peers: Annotated[bool, typer.Option("--peers/--no-peers", help="cuDNN and FlashAttention-4 too")] = True,
    rounds: Annotated[int, typer.Option(min=1, help="turns of every contender")] = 10,
    repeat_ms: Annotated[float, typer.Option(min=1, help="milliseconds of calls a turn")] = 15.0,
    warm_up_ms: Annotated[float, typer.Option(min=0, help="milliseconds of calls before a turn")] = 5.0,
    out: Annotated[Path | None, typer.Option(help="write every number to this JSON file")] = None,
    commit: Annotated[str | None, typer.Option(help="the commit, where there is no git checkout")] = None,
) -> None:
    """Times the tiles of the Hopper backward beside each other."""
    dims = numbers(head_dims)
    names = chosen_names(tiles, [tile for dim in dims for tile in backward_tiles(dim, dim)[1:]])
    cells = square_cells(backward_cells(dims, numbers(seqlens)), causal)
    watch = Stopwatch(require_gpu(), True, warm_up_ms, repeat_ms)
    ours = {dim: contenders_of(dim, names, deterministic=deterministic) for dim in dims}
    options = {"rounds": rounds, "warm_up_ms": warm_up_ms, "repeat_ms": repeat_ms, "deterministic": deterministic}
    race(cells, ours, peers((CUDNN, FA4)) if with_peers else (), watch, options, out, commit)


if __name__ == "__main__":
    typer.run(main)
