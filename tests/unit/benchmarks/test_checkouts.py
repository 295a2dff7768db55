"""The race of checkouts without a GPU: whose code runs, what it leaves behind."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
import typer

import attention_backend
from attention_backend.kernels import flash_bwd_sm90, flash_fwd_sm90
from benchmarks import checkouts as bench
from benchmarks.attention_cells import Cell
from benchmarks.attention_inputs import Tensors
from benchmarks.checkouts import Section

ANSWERS = {
    "flash_fwd_sm90": "def forward(args):\n    return args.q * 0 + 1, None\n",
    "flash_bwd_sm90": """class Gradients:
    def __init__(self, dq):
        self.dq = dq


def backward(args, out, lse, grad_out):
    assert lse is None, "the lse of this checkout's own forward"
    return Gradients(out + 1)
""",
}


def cell(section: Section) -> Cell:
    return Cell(section, 1, 16, 16, 1, 1, 64, True)


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """Another checkout, whose forward answers ones, and whose gradients are its outputs and one."""
    folder = tmp_path / "before"
    shutil.copytree(Path(attention_backend.__file__).parent, folder / bench.PACKAGE)
    for name, answer in ANSWERS.items():
        kernel = folder / bench.PACKAGE / "kernels" / f"{name}.py"
        kernel.write_text(f"{kernel.read_text()}\n\n{answer}")
    return folder


def modules() -> dict[str, object]:
    return {name: module for name, module in sys.modules.items() if name.split(".")[0] == bench.PACKAGE}


@pytest.mark.parametrize(("section", "answer"), [(Section.FORWARD, 1), (Section.BACKWARD, 2)])
def test_a_folders_own_code_runs_and_ours_stays_what_is_imported(section: Section, answer: int, before: Path) -> None:
    path, ours = list(sys.path), modules()
    inputs = Tensors.random(cell(section), torch.device("cpu"))
    call = bench.checkout(before).call(section, False, cell(section), inputs)
    assert bool((call() == answer).all())
    assert sys.path == path
    assert modules() == ours
    assert sys.modules["attention_backend.kernels.flash_fwd_sm90"] is flash_fwd_sm90
    assert sys.modules["attention_backend.kernels.flash_bwd_sm90"] is flash_bwd_sm90


def test_contenders_are_ours_and_the_folders_by_their_names(before: Path) -> None:
    racing = bench.contenders(Section.BACKWARD, [before])
    assert [each.name for each in racing] == ["longwave", "longwave-before"]
    inputs = Tensors.random(cell(Section.BACKWARD), torch.device("cpu"))
    assert bool((racing[1].makes["backward"](cell(Section.BACKWARD), inputs)() == 2).all())
    with pytest.raises(typer.BadParameter, match="one name"):
        bench.contenders(Section.FORWARD, [before, before])


def test_a_folder_without_kernels_is_an_argument_that_names_nothing(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="no attention_backend"):
        bench.contenders(Section.FORWARD, [tmp_path])


def test_only_a_checkout_of_gits_has_a_commit(tmp_path: Path) -> None:
    assert bench.commit_of(tmp_path) is None
