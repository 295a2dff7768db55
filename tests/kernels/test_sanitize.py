"""The sanitizer's grid runs and its command line is what is documented; the sanitizer itself needs a GPU."""

import pytest
import torch
import typer
from typer.testing import CliRunner

from attention_backend import dispatch

from . import sanitize


def test_the_grid_runs_on_cpu() -> None:
    assert sanitize.run_grid(torch.device("cpu")) == len(sanitize.GRID) + 3


def test_the_generic_kernels_problems_run_on_cpu() -> None:
    assert sanitize.run_generic(torch.device("cpu")) == len(sanitize.FEW_ROWS) + len(sanitize.MANY_ROWS)


def test_the_features_run_on_cpu() -> None:
    assert sanitize.run_features(torch.device("cpu")) == 5


def test_the_layers_run_on_cpu() -> None:
    assert sanitize.run_layers(torch.device("cpu")) == 11


def test_the_linears_run_on_cpu() -> None:
    assert sanitize.run_linears(torch.device("cpu")) == 6


def test_the_gradients_run_on_cpu() -> None:
    assert sanitize.run_gradients(torch.device("cpu")) == 2 * (len(sanitize.GRADIENTS) + len(sanitize.DROPPED))


def test_the_tiles_run_on_cpu() -> None:
    assert sanitize.run_tiles(torch.device("cpu")) == 18


@pytest.mark.gpu
def test_the_gradients_run(device: torch.device) -> None:
    kernels = 3 if torch.cuda.get_device_capability(device) == (9, 0) else 2  # the exact path is one of them
    assert sanitize.run_gradients(device) == 2 * kernels * (len(sanitize.GRADIENTS) + len(sanitize.DROPPED))


@pytest.mark.gpu
def test_the_tiles_run(device: torch.device) -> None:
    assert sanitize.run_tiles(device) == 18


@pytest.mark.gpu
def test_the_grid_runs(device: torch.device) -> None:
    assert sanitize.run_grid(device) == len(sanitize.GRID) + 3


@pytest.mark.gpu
def test_the_generic_kernels_run(device: torch.device) -> None:
    before = dispatch.calls()
    assert sanitize.run_generic(device) == len(sanitize.FEW_ROWS) + len(sanitize.MANY_ROWS)
    assert dispatch.calls() == before, "none of them is chosen by dispatch"


@pytest.mark.gpu
def test_the_features_run(device: torch.device) -> None:
    fp8 = torch.cuda.get_device_capability(device) == (9, 0)
    assert sanitize.run_features(device) == 5 + 2 * fp8


@pytest.mark.gpu
def test_the_layers_run(device: torch.device) -> None:
    chain = torch.cuda.get_device_capability(device) == (9, 0)  # it runs four times and has two results
    assert sanitize.run_layers(device) == 12 + 8 * chain


@pytest.mark.gpu
def test_the_linears_run(device: torch.device) -> None:
    assert sanitize.run_linears(device) == 6


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


RACE = "Error: Race reported between Write access at"
STORE = "and Write access at store_shared(unsigned int, const unsigned int (&)[4])"
RACES = f"""\
========= COMPUTE-SANITIZER
========= {RACE} clear_values(unsigned int, const Tile &)+0x48 in forward_masks.cuh:9
=========     {STORE}+0xda in forward_convert.cuh:22 [36 hazards]
=========     {STORE}+0xdb in forward_convert.cuh:22 [35 hazards]
=========
66 problems ran
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
ANOTHER = f"========= {RACE} store_ds(unsigned int)+0x10 in backward_scores.cuh:9\n"
NO_MORE_WORK = f"""\
========= {RACE} WorkLine::draw(int, Tile &, const HopperParams &)+0xf000 in forward_work.cuh:82
=========     and Read access at Consumer::next_tile(int) const+0x6a0 in flash_fwd_sm90.cuh:188 [20 hazards]
=========     and Read access at void for_tiles<void load_tiles<(bool)1>()>(T1)+0xb9 in forward_loads.cuh:48
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


SUMS = f"""\
========= {RACE} store_sums(unsigned int, const float *)+0x5180 in backward_dq.cuh:26
=========     and Write access at store_sums(unsigned int, const float *)+0x5180 in backward_dq.cuh:26 [17450 hazards]
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


@pytest.mark.parametrize(
    ("output", "unknown"),
    [
        (RACES, 0),
        (NO_MORE_WORK, 0),
        (SUMS, 0),
        (SUMS.replace("store_sums(", "void wgmma_wait<(int)0>(").replace("backward_dq", "wgmma_sm90"), 0),
        (SUMS.replace("Write access at store_sums(", "Write access at void wgmma_wait<(int)0>(", 1), 1),
        (SUMS.replace("and Write access at store_sums", "and Write access at store_shared4"), 1),
        (NO_MORE_WORK.replace("for_tiles<", "store<"), 1),
        (RACES.replace("store_shared", "clear_values").replace("forward_convert", "forward_masks"), 1),  # with itself
        (RACES.replace("clear_values", "load_values"), 1),
        (RACES.replace("1 hazard ", "2 hazards ") + ANOTHER, 1),
        (RACES.replace("1 hazard ", "2 hazards "), None),  # one that was not printed
        (RACES.replace(" in forward_masks.cuh:9", ""), None),  # no line numbers
        ("", None),
    ],
)
def test_only_known_races_of_known_lines_are_none(output: str, unknown: int | None) -> None:
    assert sanitize.unknown_races(output) == unknown
    assert (sanitize.verdict("racecheck", sanitize.FOUND, output) is None) == (unknown == 0)
    assert sanitize.verdict("synccheck", sanitize.FOUND, output) is not None
    assert sanitize.verdict("racecheck", 1, output) is not None


def test_memory_that_nobody_wrote_is_not_a_number_under_the_tools() -> None:
    with sanitize.filled_memory():
        made = (torch.empty(3), torch.empty_like(torch.zeros(2)), torch.zeros(1).new_empty((2, 2)))
        assert all(bool(x.isnan().all()) for x in made)
        assert torch.empty(2, dtype=torch.int32).tolist() == [2**31 - 1] * 2
