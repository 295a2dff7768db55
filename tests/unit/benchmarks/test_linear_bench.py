"""The linear attention benchmark without a GPU: counting, checking, the table, where it is cheaper, the file."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import linear_attention as bench
from benchmarks.linear_attention import LINEAR, SOFTMAX, Cell, Report, Row
from benchmarks.stopwatch import Call, Stopwatch

CPU = torch.device("cpu")


class InstantWatch(Stopwatch):
    """Runs every call once and says it took a millisecond."""

    def __post_init__(self) -> None:
        return

    def times(self, calls: Sequence[Call]) -> list[float]:
        for call in calls:
            call()
        return [1.0] * len(calls)


def row(seqlen: int, linear: float | None, softmax: float | None, *, causal: bool = False) -> Row:
    times = {LINEAR: linear, SOFTMAX: softmax}
    return Row(Cell(64, causal, seqlen), {name: ms for name, ms in times.items() if ms is not None}, {}, 1e-3)


@pytest.fixture
def report() -> Report:
    rows = [row(1024, 2.0, 1.0), row(2048, 1.0, 1.5), row(4096, 3.0, 2.0), row(8192, 2.0, 8.0), row(16384, 2.0, 32.0)]
    return Report({"gpu": "none"}, {"rounds": 2}, 4.0, rows)


def test_bytes_are_four_tensors_of_two_bytes_an_element() -> None:
    assert Cell(128, True, 1000, heads=3).least_bytes == 4 * 1000 * 3 * 128 * 2


def test_linear_operations_grow_with_the_length_and_softmax_ones_with_its_square() -> None:
    short, long = Cell(64, False, 1024), Cell(64, False, 2048)
    assert long.flops(LINEAR) == 2 * short.flops(LINEAR)
    assert long.flops(SOFTMAX) == 4 * short.flops(SOFTMAX) == 8 * Cell(64, True, 1024).flops(SOFTMAX)
    assert short.flops(LINEAR) == 4 * 16 * 1024 * 64 * 64


def test_cheaper_from_ignores_a_length_that_was_lost_again(report: Report) -> None:
    assert report.cheaper_from() == {(64, "full"): 8192}
    assert Report({}, {}, 4.0, [row(1024, 2.0, 1.0), row(2048, 1.0, None)]).cheaper_from() == {(64, "full"): None}


def test_the_table_has_a_line_per_cell_and_dashes_for_what_is_missing(report: Report) -> None:
    report.rows.append(row(65536, None, 100.0, causal=True))
    lines = report.table().splitlines()
    assert len(lines) == 1 + 6
    assert len({len(line) for line in lines}) == 1
    rate = 4 * 1024 * 16 * 64 * 2 / 2.0 / 1e9
    assert lines[1].split() == [
        "64",
        "full",
        "1024",
        "2.0000",
        f"{rate:.2f}",
        f"{rate / 4:.2f}",
        "1.0000",
        "4.3",
        "0.50",
    ]
    assert lines[-1].split()[3:6] == ["-", "-", "-"]


def test_the_file_holds_every_number(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    report.write(path)
    content = json.loads(path.read_text())
    assert [path] == list(path.parent.iterdir())
    assert content["cheaper_from"] == [{"head_dim": 64, "mask": "full", "seqlen": 8192}]
    cell = content["cells"][3]
    assert cell["results"][SOFTMAX]["tflops"] == pytest.approx(4 * 16 * 8192 * 8192 * 64 / 8.0 / 1e9)
    assert cell["results"][LINEAR]["tb_per_s"] == pytest.approx(cell["least_bytes"] / 2.0 / 1e9)


@pytest.mark.parametrize("causal", [False, True])
def test_a_cell_is_checked_and_timed(causal: bool) -> None:
    found = bench.measure(Cell(16, causal, 100, heads=2), InstantWatch(CPU), rounds=1)
    assert found.ms == {LINEAR: 1.0, SOFTMAX: 1.0}
    assert found.reasons == {}
    assert found.error is not None
    assert found.error < bench.TOLERANCE


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "linear_attention", lambda q, *_, **__: torch.full_like(q, math.nan))
    found = bench.measure(Cell(16, False, 100, heads=2), InstantWatch(CPU), rounds=1)
    assert set(found.ms) == {SOFTMAX}
    assert found.reasons == {LINEAR: "wrong result: relative error nan"}
    Report({}, {}, 4.0, [found]).write(tmp_path / "results.json")


def test_a_kernel_that_fails_is_recorded_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise NotImplementedError("no such head_dim")

    monkeypatch.setattr(bench, "linear_attention", refuse)
    found = bench.measure(Cell(16, False, 100, heads=2), InstantWatch(CPU), rounds=1)
    assert found.reasons == {LINEAR: "NotImplementedError: no such head_dim"}


def test_the_grid_is_every_combination() -> None:
    assert len(bench.cells(bench.HEAD_DIMS, bench.SEQLENS)) == 2 * 2 * 7


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so_in_one_sentence_and_exits_with_2() -> None:
    app = typer.Typer()
    app.command()(bench.main)
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2
    assert result.stderr == "This benchmark times CUDA kernels and torch sees no NVIDIA GPU here.\n"
    assert CliRunner().invoke(app, ["--head-dims", "64;128"]).exit_code == 2
