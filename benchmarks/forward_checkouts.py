"""The Hopper forward of other checkouts beside this one's: what a change to it gains, and where it costs.

    git worktree add ../before COMMIT
    python benchmarks/forward_checkouts.py ../before [FOLDER ...] [--head-dims 64,128,256] [--seqlens 512,1024,2048]
                                           [--causal | --full] [--peers] [--out results.json]

Processes of their own differ by some percent, so all of them run in one: each folder's `attention_backend` is imported
beside this one's. Cells, inputs, clock and checks are those of `benchmarks/attention.py forward`: checkouts take turns
on the same inputs, each with the tiles that it chooses, and outputs are compared with a float32 truth before and after
they are timed. The tables give this checkout's TFLOP/s, and how many times as fast each of the others is, by its
folder's name; with --peers cuDNN and FlashAttention-3 too, where they can be imported.

Exit code 0: timed. 1: a result was wrong or missing. 2: no NVIDIA GPU, or an argument that names nothing.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module, invalidate_caches
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

from attention_backend.kernels import flash_fwd_sm90
from attention_backend.problem import AttentionArgs
from benchmarks import machine
from benchmarks.arguments import numbers, require_gpu
from benchmarks.attention_cells import Cell
from benchmarks.attention_grid import forward_cells
from benchmarks.attention_inputs import Tensors
from benchmarks.attention_registry import CUDNN, FA3, OURS, Call, Contender, Make
from benchmarks.stopwatch import Stopwatch
from benchmarks.tile_race import peers, race

SECTION = "forward"
PACKAGE = "attention_backend"

Forward = Callable[[Cell, Tensors], Tensor]


@contextmanager
def another(folder: Path) -> Iterator[None]:
    """What is imported of the package meanwhile is the folder's, and stays with who imported it."""

    def modules() -> dict[str, Any]:
        return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == PACKAGE}

    ours = modules()
    for name in ours:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in modules():
            del sys.modules[name]
        sys.modules.update(ours)


def forward_of(folder: Path) -> Forward:
    """The forward of the checkout in a folder. Raises typer.BadParameter where there is none."""
    if not (folder / PACKAGE / "kernels" / "flash_fwd_sm90.py").is_file():
        raise typer.BadParameter(f"{folder} has no {PACKAGE} with a Hopper forward")
    with another(folder.resolve()):
        kernel, problem = (import_module(f"{PACKAGE}.{name}") for name in ("kernels.flash_fwd_sm90", "problem"))
    return _forward(kernel.forward, problem.AttentionArgs)


def _forward(kernel: Callable[[Any], tuple[Tensor, Tensor]], args: Callable[..., Any]) -> Forward:
    def forward(cell: Cell, t: Tensors) -> Tensor:
        return kernel(args(t.q, t.k, t.v, cell.head_dim**-0.5, window_right=0 if cell.causal else -1))[0]

    return forward


def contenders(folders: Sequence[Path]) -> list[Contender]:
    """This checkout's forward, as OURS, and those of the folders, by their names."""
    if len({folder.resolve().name for folder in folders}) < len(folders):
        raise typer.BadParameter("two folders have one name, which is what tells them apart here")
    forwards = {OURS: _forward(flash_fwd_sm90.forward, AttentionArgs)}
    forwards |= {f"{OURS}-{folder.resolve().name}": forward_of(folder) for folder in folders}
    return [Contender(name, {SECTION: _call_of(forward)}) for name, forward in forwards.items()]


def _call_of(forward: Forward) -> Make:
    def make(cell: Cell, t: Tensors) -> Call:
        return lambda: forward(cell, t)

    return make


def commit_of(folder: Path) -> str | None:
    """None where the folder is no checkout of git's."""
    return machine.output("git", "-C", str(folder), "rev-parse", "HEAD") if (folder / ".git").exists() else None


def main(
    folders: Annotated[list[Path], typer.Argument(help="of the other checkouts")],
    head_dims: Annotated[str, typer.Option(help="such as 64,96")] = "64,128,256",
    seqlens: Annotated[str, typer.Option(help="lengths; 16k tokens in all, or one sequence")] = "512,1024,2048,16384",
    causal: Annotated[bool | None, typer.Option("--causal/--full", help="one mask; both by default")] = None,
    with_peers: Annotated[bool, typer.Option("--peers/--no-peers", help="cuDNN and FlashAttention-3 too")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="turns of every contender")] = 7,
    repeat_ms: Annotated[float, typer.Option(min=1, help="milliseconds of calls a turn")] = 12.0,
    warm_up_ms: Annotated[float, typer.Option(min=0, help="milliseconds of calls before a turn")] = 5.0,
    out: Annotated[Path | None, typer.Option(help="write every number to this JSON file")] = None,
    commit: Annotated[str | None, typer.Option(help="the commit, where there is no git checkout")] = None,
) -> None:
    """Times the Hopper forward of several checkouts beside each other."""
    dims = numbers(head_dims)
    racing = contenders(folders)
    cells = [cell for cell in forward_cells(dims, numbers(seqlens)) if causal in (None, cell.causal)]
    if not cells:
        raise typer.BadParameter("no cell has these dimensions")
    watch = Stopwatch(require_gpu(), True, warm_up_ms, repeat_ms)
    options: dict[str, Any] = {"rounds": rounds, "warm_up_ms": warm_up_ms, "repeat_ms": repeat_ms}
    options |= {"checkouts": {folder.resolve().name: commit_of(folder) for folder in folders}}
    race(cells, dict.fromkeys(dims, racing), peers((CUDNN, FA3)) if with_peers else (), watch, options, out, commit)


if __name__ == "__main__":
    typer.run(main)
