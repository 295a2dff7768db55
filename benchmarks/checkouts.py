"""The Hopper kernels of other checkouts beside this one's: what a change to them gains, and where it costs.

    git worktree add ../before COMMIT
    python benchmarks/checkouts.py forward ../before [FOLDER ...] [--head-dims 64,128,256] [--seqlens 512,1024,2048]
                                   [--causal | --full] [--peers] [--out results.json]
    python benchmarks/checkouts.py backward ../before [--deterministic] ...

Processes of their own differ by some percent, so all of them run in one: each folder's `attention_backend` is imported
beside this one's. Cells, inputs, clock and checks are those of `benchmarks/attention.py forward` and `backward`:
checkouts take turns on the same inputs, each with the tiles that it chooses, and outputs, or gradients of the queries,
are compared with a float32 truth before and after they are timed. The tables give this checkout's TFLOP/s, and how many
times as fast each of the others is, by its folder's name; with --peers those of the benchmark too that can be imported:
cuDNN, and FlashAttention-3 or (backward) 4.

Three checkouts' forwards in 34 cells take less than a minute on an H200, once compiled. Exit code 0: timed. 1: a result
was wrong or missing. 2: no NVIDIA GPU, or an argument that names nothing.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from importlib import import_module, invalidate_caches
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

from attention_backend.kernels import flash_bwd_sm90, flash_fwd_sm90
from attention_backend.problem import AttentionArgs
from benchmarks import machine
from benchmarks.arguments import numbers, require_gpu
from benchmarks.attention_cells import Cell
from benchmarks.attention_grid import backward_cells, forward_cells
from benchmarks.attention_inputs import Tensors
from benchmarks.attention_registry import CUDNN, FA3, FA4, OURS, Call, Contender
from benchmarks.stopwatch import Stopwatch
from benchmarks.tile_race import peers, race

PACKAGE = "attention_backend"


class Section(StrEnum):
    """What is timed: names of the benchmark's sections."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Checkout(NamedTuple):
    """What is called of one."""

    forward: Callable[[Any], Any]
    backward: Callable[..., Any]
    args: Callable[..., Any]

    def call(self, section: Section, deterministic: bool, cell: Cell, t: Tensors) -> Call:
        right = 0 if cell.causal else -1
        args = self.args(t.q, t.k, t.v, cell.head_dim**-0.5, window_right=right, deterministic=deterministic)
        if section is Section.FORWARD:
            return lambda: self.forward(args)[0]
        out, lse = self.forward(args)
        return lambda: self.backward(args, out, lse, t.grad_out).dq


OWN = Checkout(flash_fwd_sm90.forward, flash_bwd_sm90.backward, AttentionArgs)
CELLS = {Section.FORWARD: forward_cells, Section.BACKWARD: backward_cells}
PEERS = {Section.FORWARD: (CUDNN, FA3), Section.BACKWARD: (CUDNN, FA4)}


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


def checkout(folder: Path) -> Checkout:
    """The one in a folder. Raises typer.BadParameter where there is none."""
    if not (folder / PACKAGE / "kernels" / "flash_fwd_sm90.py").is_file():
        raise typer.BadParameter(f"{folder} has no {PACKAGE} with Hopper kernels")
    with another(folder.resolve()):
        forward, backward, problem = (
            import_module(f"{PACKAGE}.{name}")
            for name in ("kernels.flash_fwd_sm90", "kernels.flash_bwd_sm90", "problem")
        )
    return Checkout(forward.forward, backward.backward, problem.AttentionArgs)


def contenders(section: Section, folders: Sequence[Path], *, deterministic: bool = False) -> list[Contender]:
    """This checkout, as OURS, and those of the folders, by their names."""
    if len({folder.resolve().name for folder in folders}) < len(folders):
        raise typer.BadParameter("two folders have one name, which is what tells them apart here")
    racing = {OURS: OWN} | {f"{OURS}-{folder.resolve().name}": checkout(folder) for folder in folders}

    def make(each: Checkout) -> Callable[[Cell, Tensors], Call]:
        return lambda cell, t: each.call(section, deterministic, cell, t)

    return [Contender(name, {section.value: make(each)}) for name, each in racing.items()]


def commit_of(folder: Path) -> str | None:
    """None where the folder is no checkout of git's."""
    return machine.output("git", "-C", str(folder), "rev-parse", "HEAD") if (folder / ".git").exists() else None


def main(
    section: Annotated[Section, typer.Argument(help="what is timed")],
    folders: Annotated[list[Path], typer.Argument(help="of the other checkouts")],
    head_dims: Annotated[str, typer.Option(help="such as 64,96")] = "64,128,256",
    seqlens: Annotated[str, typer.Option(help="lengths; 16k tokens in all, or one sequence")] = "512,1024,2048,16384",
    causal: Annotated[bool | None, typer.Option("--causal/--full", help="one mask; both by default")] = None,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="backward: sums that repeat bitwise")] = False,
    with_peers: Annotated[bool, typer.Option("--peers/--no-peers", help="the benchmark's peers too")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="turns of every contender")] = 7,
    repeat_ms: Annotated[float, typer.Option(min=1, help="milliseconds of calls a turn")] = 12.0,
    warm_up_ms: Annotated[float, typer.Option(min=0, help="milliseconds of calls before a turn")] = 5.0,
    out: Annotated[Path | None, typer.Option(help="write every number to this JSON file")] = None,
    commit: Annotated[str | None, typer.Option(help="the commit, where there is no git checkout")] = None,
) -> None:
    """Times the Hopper kernels of several checkouts beside each other."""
    dims = numbers(head_dims)
    racing = contenders(section, folders, deterministic=deterministic)
    cells = [cell for cell in CELLS[section](dims, numbers(seqlens)) if causal in (None, cell.causal)]
    if not cells:
        raise typer.BadParameter("no cell has these dimensions")
    watch = Stopwatch(require_gpu(), True, warm_up_ms, repeat_ms)
    options: dict[str, Any] = {"rounds": rounds, "warm_up_ms": warm_up_ms, "repeat_ms": repeat_ms}
    options |= {"deterministic": deterministic, "checkouts": {each.resolve().name: commit_of(each) for each in folders}}
    others = peers(PEERS[section]) if with_peers else ()
    race(cells, dict.fromkeys(dims, racing), others, watch, options, out, commit)


if __name__ == "__main__":
    typer.run(main)
