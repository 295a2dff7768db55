"""The sanitizer's grid runs and its command line is what is documented; the sanitizer itself needs a GPU."""

import pytest
import torch

from . import sanitize


def test_the_grid_runs_on_cpu() -> None:
    assert sanitize.run_grid(torch.device("cpu")) == len(sanitize.GRID) + 3


def test_the_features_run_on_cpu() -> None:
    assert sanitize.run_features(torch.device("cpu")) == 5


def test_the_layers_run_on_cpu() -> None:
    assert sanitize.run_layers(torch.device("cpu")) == 9


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
    assert sanitize.run_layers(device) == 10


@pytest.mark.parametrize("tool", sanitize.TOOLS)
def test_a_finding_ends_the_command_with_its_own_exit_code(tool: str) -> None:
    command = sanitize.command(tool)
    assert command[:5] == ["compute-sanitizer", "--tool", tool, "--error-exitcode", "99"]
    assert command[-3:] == ["-m", "tests.kernels.sanitize", "--grid"]


def test_torch_kernels_are_skipped_only_where_their_writes_do_not_matter() -> None:
    assert [tool for tool in sanitize.TOOLS if "kns=at6native" in sanitize.command(tool)] == ["racecheck", "synccheck"]


def test_an_unknown_tool_is_refused() -> None:
    assert sanitize.main(["valgrind"]) == 2
