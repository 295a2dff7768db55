"""The race of checkouts without a GPU: whose code runs, what it leaves behind."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
import typer

import attention_backend
from attention_backend.kernels import flash_fwd_sm90
from benchmarks import forward_checkouts as bench
from benchmarks.attention_cells import Cell
from benchmarks.attention_inputs import Tensors

CELL = Cell("forward", 1, 16, 16, 1, 1, 64, True)


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """Another checkout, whose forward answers ones."""
    folder = tmp_path / "before"
    shutil.copytree(Path(attention_backend.__file__).parent, folder / bench.PACKAGE)
    kernel = folder / bench.PACKAGE / "kernels" / "flash_fwd_sm90.py"
    kernel.write_text(kernel.read_text() + "\n\ndef forward(args):\n    return args.q * 0 + 1, None\n")
    return folder


def modules() -> dict[str, object]:
    return {name: module for name, module in sys.modules.items() if name.split(".")[0] == bench.PACKAGE}


def test_a_folders_own_code_runs_and_ours_stays_what_is_imported(before: Path) -> None:
    path, ours = list(sys.path), modules()
    forward = bench.forward_of(before)
    assert bool((forward(CELL, Tensors.random(CELL, torch.device("cpu"))) == 1).all())
    assert sys.path == path
    assert modules() == ours
    assert sys.modules["attention_backend.kernels.flash_fwd_sm90"] is flash_fwd_sm90


def test_contenders_are_ours_and_the_folders_by_their_names(before: Path) -> None:
    assert [each.name for each in bench.contenders([before])] == ["longwave", "longwave-before"]
    with pytest.raises(typer.BadParameter, match="one name"):
        bench.contenders([before, before])


def test_a_folder_without_a_forward_is_an_argument_that_names_nothing(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="no attention_backend"):
        bench.contenders([tmp_path])


def test_only_a_checkout_of_gits_has_a_commit(tmp_path: Path) -> None:
    assert bench.commit_of(tmp_path) is None
