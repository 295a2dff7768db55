import os
import stat
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from attention_backend.heuristics.sm90_backward import backward_tiles
from benchmarks import power
from benchmarks.attention_registry import OURS


def test_what_was_cut_off_is_no_reading() -> None:
    lines = ["1640, 689.52", "1655, 690.10", "[N/A], 12.3", "", "16"]
    assert power.readings(lines) == [(1640.0, 689.52), (1655.0, 690.1)]


def test_the_reader_writes_until_it_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = tmp_path / "nvidia-smi"
    reader.write_text("#!/bin/sh\nwhile echo '1640, 689.52'; do sleep 0.01; done\n")
    reader.chmod(reader.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with (tmp_path / "read").open("w+") as text:
        with power.watched(text):
            while not (tmp_path / "read").stat().st_size:
                pass
        text.seek(0)
        assert set(power.readings(text.read().splitlines())) == {(1640.0, 689.52)}


def test_all_tiles_of_the_backward_run_and_the_default_once() -> None:
    names = [each.name for each in power.contenders(power.Section.BACKWARD, 128, None) if each.ours]
    default, *others = backward_tiles(128, 128)
    assert names == [OURS, *(f"{OURS}-{tile}" for tile in others)]
    assert str(default) not in names
    assert [each.name for each in power.contenders(power.Section.FORWARD, 128, [OURS])] == [OURS]


def test_contenders_that_are_not_there_are_named() -> None:
    with pytest.raises(typer.BadParameter, match="no contender named \\['nobody'\\]; there are \\['longwave'"):
        power.contenders(power.Section.FORWARD, 128, ["nobody"])


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="there is a GPU")
@pytest.mark.parametrize("section", ["forward", "backward"])
def test_without_a_gpu_nothing_runs(section: str) -> None:
    app = typer.Typer()
    app.command()(power.main)
    assert CliRunner().invoke(app, [section]).exit_code == 2
