"""The benchmark of the Hopper backward's tiles without a GPU: who races, what is compared, the table."""

import pytest
import torch

from attention_backend.heuristics.sm90_backward import backward_tiles
from attention_backend.reference.gradients import Gradients
from benchmarks import backward_tiles as bench
from benchmarks import tile_race
from benchmarks.attention_cells import Cell
from benchmarks.attention_report import Record, Report, Result

CELL = Cell("backward", 2, 8192, 8192, 32, 32, 64, True)
OTHER = "longwave-joint-kept4+4"


def record(default: float | None, other: float | None, cudnn: float | None = None) -> Record:
    return Record(CELL, {"longwave": Result(default), OTHER: Result(other, "why"), "cudnn": Result(cudnn, "none")})


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_every_tile_races_and_the_default_is_the_first(head_dim: int) -> None:
    names = [contender.name for contender in bench.contenders_of(head_dim, None)]
    assert names == ["longwave", *(f"longwave-{tile}" for tile in backward_tiles(head_dim, head_dim)[1:])]
    assert all(contender.ours for contender in bench.contenders_of(head_dim, None))


def test_tiles_are_chosen_by_their_names_beside_the_default() -> None:
    tile = str(backward_tiles(64, 64)[1])
    assert [c.name for c in bench.contenders_of(64, [tile])] == ["longwave", f"longwave-{tile}"]


def test_the_table_has_the_defaults_rate_and_the_others_over_it() -> None:
    lines = tile_race.table([record(2.0, 1.0, 4.0), record(2.0, 4.0)]).splitlines()
    assert lines[0].split() == ["d", "mask", "q=keys", "TFLOP/s", "joint-kept4+4", "cudnn"]
    rate = f"{CELL.flops / 2.0 / 1e9:.0f}"
    assert lines[1].split() == ["64", "causal", "2x8192", rate, "2.000", "0.500"]
    assert lines[2].split() == ["64", "causal", "2x8192", rate, "0.500", "-"]
    assert lines[3].split() == ["mean", "1.000", "0.500"]


def test_a_record_without_a_time_has_no_ratio() -> None:
    report = Report({}, {}, records=[record(None, 1.0)])
    assert tile_race.table(report.records).splitlines()[1].split()[3:] == ["-", "-", "-"]
    assert tile_race.table(report.records).splitlines()[2].split() == ["mean", "-", "-"]


@pytest.mark.parametrize("wrong", ["dk", "dv"])
def test_gradients_of_keys_and_values_are_compared(wrong: str) -> None:
    x = torch.randn(64)
    right = {"dq": x, "dk": x, "dv": x}
    bench.compare(Gradients(**right, dbias=None, dsinks=None), Gradients(**right, dbias=None, dsinks=None))
    for other in (x * 1.1, x * torch.nan):
        with pytest.raises(ValueError, match=wrong):
            bench.compare(
                Gradients(**right | {wrong: other}, dbias=None, dsinks=None),
                Gradients(**right, dbias=None, dsinks=None),
            )
