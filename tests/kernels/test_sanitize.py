"""The sanitizer's grid runs and its command line is what is documented; the sanitizer itself needs a GPU."""

import pytest
import torch
import typer
from typer.testing import CliRunner

from . import sanitize


def test_the_grid_runs_on_cpu() -> None:
    assert sanitize.run_grid(torch.device("cpu")) == len(sanitize.GRID) + 3


def test_the_features_run_on_cpu() -> None:
    assert sanitize.run_features(torch.device("cpu")) == 5


def test_the_layers_run_on_cpu() -> None:
    assert sanitize.run_layers(torch.device("cpu")) == 11


def test_the_gradients_run_on_cpu() -> None:
    assert sanitize.run_gradients(torch.device("cpu")) == 2 * len(sanitize.GRADIENTS)


@pytest.mark.gpu
def test_the_gradients_run(device: torch.device) -> None:
    kernels = 3 if torch.cuda.get_device_capability(device) == (9, 0) else 2  # the exact path is one of them
    assert sanitize.run_gradients(device) == 2 * kernels * len(sanitize.GRADIENTS)


@pytest.mark.gpu
def test_the_grid_runs(device: torch.device) -> None:
    assert sanitize.run_grid(device) == len(sanitize.GRID) + 3


@pytest.mark.gpu
def test_the_features_run(device: torch.device) -> None:
    fp8 = torch.cuda.get_device_capability(device) == (9, 0)
    assert sanitize.run_features(device) == 5 + fp8


@pytest.mark.gpu
def test_the_layers_run(device: torch.device) -> None:
    chain = torch.cuda.get_device_capability(device) == (9, 0)  # it runs four times and has two results
    assert sanitize.run_layers(device) == 12 + 8 * chain


@pytest.mark.parametrize("tool", sanitize.TOOLS)
def test_a_finding_ends_the_command_with_its_own_exit_code(tool: str) -> None:
    command = sanitize.command(tool, "layers")
    assert command[:5] == ["compute-sanitizer", "--tool", tool, "--error-exitcode", "99"]
    assert command[-4:] == ["-m", "tests.kernels.sanitize", "--grid", "layers"]


def test_torch_kernels_are_skipped_only_where_their_writes_do_not_matter() -> None:
    skipping = [tool for tool in sanitize.TOOLS if "kns=at6native" in sanitize.command(tool, "all")]
    assert skipping == ["racecheck", "synccheck"]


@pytest.mark.parametrize("arguments", [["valgrind"], ["memcheck", "--only", "layers,nonsense"], ["--grid", "nonsense"]])
def test_what_it_does_not_know_is_refused(arguments: list[str]) -> None:
    app = typer.Typer()
    app.command()(sanitize.main)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "there are" in result.output


def test_parts_are_chosen_by_name() -> None:
    assert sanitize.chosen("layers,gradients") == ["layers", "gradients"]
    assert sanitize.chosen("all") == list(sanitize.PARTS)
