"""What the benchmarks of a kernel's tiles do alike, as commands, without a GPU."""

from types import ModuleType

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import backward_tiles, forward_tiles
from benchmarks.attention_grid import forward_cells
from benchmarks.tile_race import square_cells

TILES = {backward_tiles: "joint-kept4+4", forward_tiles: "own"}

each = pytest.mark.parametrize("bench", TILES, ids=lambda bench: bench.SECTION)


def run(bench: ModuleType, *arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(bench.main)
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


@each
def test_a_name_that_is_no_tile_is_an_argument_that_names_nothing(bench: ModuleType) -> None:
    code, output = run(bench, "--tiles", f"{TILES[bench]},other", "--head-dims", "64")
    assert code == 2
    assert "other" in output


def test_cells_are_of_the_mask_that_is_asked_for() -> None:
    cells = list(forward_cells((64,), (512,)))
    assert [cell.causal for cell in square_cells(cells, True)] == [True]
    assert [cell.causal for cell in square_cells(cells, None)] == [True, False]
    with pytest.raises(typer.BadParameter, match="no cell"):
        square_cells([], None)


@each
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(bench: ModuleType) -> None:
    code, output = run(bench, "--causal")
    assert code == 2
    assert "no NVIDIA GPU" in output
