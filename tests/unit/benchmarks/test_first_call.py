"""The first-call benchmark without a GPU: fresh directories, medians, goals, the table, and its own process."""

import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import first_call as bench
from benchmarks.first_call import Report, Row, Sample


def test_a_round_is_a_cold_and_a_warm_process_in_one_new_directory() -> None:
    seen: list[tuple[Path, bool]] = []

    def run(name: str, cache: Path) -> Sample:
        assert name == "decode"
        seen.append((cache, any(cache.iterdir())))
        (cache / "kernel").touch()
        return Sample(len(seen), 0.0)

    row = bench.measure("decode", rounds=2, run=run)
    assert [s.call_ms for s in row.cold] == [1, 3]
    assert [s.call_ms for s in row.warm] == [2, 4]
    folders, used = zip(*seen, strict=True)
    assert used == (False, True, False, True)
    assert folders[0] == folders[1] != folders[2]
    assert not any(folder.exists() for folder in folders)


def test_a_process_that_fails_is_recorded_with_its_reason() -> None:
    def run(name: str, cache: Path) -> Sample:
        raise RuntimeError("no kernel")

    assert bench.measure("decode", rounds=2, run=run) == Row("decode", failure="no kernel")


def test_medians_are_of_each_number_by_itself() -> None:
    samples = [Sample(1.0, 30.0), Sample(3.0, 10.0), Sample(2.0, 20.0)]
    assert bench.median(samples) == Sample(2.0, 20.0)
    assert bench.median([Sample(1.0, 30.0), Sample(3.0, 10.0), Sample(2.0, 40.0)]) == Sample(2.0, 30.0)


@pytest.mark.parametrize(("cold", "warm", "met"), [(1900.0, 40.0, True), (2100.0, 40.0, False), (1900.0, 60.0, False)])
def test_goals_are_judged_by_first_calls(cold: float, warm: float, met: bool) -> None:
    rows = [Row("decode", (Sample(cold, 1.0),), (Sample(warm, 1.0),))]
    assert Report({}, rows).met() is met
    assert Report({}, [*rows, Row("paged", failure="x")]).met() is None


def test_the_table_and_the_file_hold_every_variant(tmp_path: Path) -> None:
    rows = [Row("decode", (Sample(900.0, 1.0),), (Sample(20.0, 0.5),)), Row("paged", failure="no kernel")]
    report = Report({"gpu": "none"}, rows)
    lines = report.table().splitlines()
    assert lines[1].split() == ["decode", "900.0", "20.0", "0.5"]
    assert lines[2].split() == ["paged", "-", "-", "-"]
    report.write(tmp_path / "new" / "results.json")
    assert Report.read(tmp_path / "new" / "results.json") == report
    content = json.loads((tmp_path / "new" / "results.json").read_text())
    assert content["goals"] == {"cold_ms": 2000.0, "warm_ms": 50.0, "met": None}
    assert content["variants"][0]["cold"] == [{"call_ms": 900.0, "second_ms": 1.0}]


@pytest.mark.slow
def test_a_fresh_process_times_its_first_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    sample = bench.in_fresh_process("decode", tmp_path)
    assert sample.call_ms > 0
    assert sample.second_ms > 0


@pytest.mark.thorough
def test_a_fresh_process_that_dies_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="KeyError: 'no such variant'"):
        bench.in_fresh_process("no such variant", tmp_path)


def test_an_unknown_variant_is_refused() -> None:
    app = typer.Typer()
    app.command()(bench.main)
    result = CliRunner().invoke(app, ["--only", "decode,backward"])
    assert result.exit_code == 2
    assert "backward" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so_in_one_sentence_and_exits_with_2() -> None:
    app = typer.Typer()
    app.command()(bench.main)
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2
    assert result.stderr == "This benchmark times CUDA kernels and torch sees no NVIDIA GPU here.\n"
