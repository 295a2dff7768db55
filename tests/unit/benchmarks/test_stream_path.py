"""The way through HTTP beside the engine alone: real processes, whose steps take no time."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import stream_path


@pytest.mark.thorough
def test_every_token_comes_both_ways(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(stream_path.main)
    out = tmp_path / "results.json"
    asked = ["--streams", "8", "--rounds", "1", "--slower", "0", "--cases", "streams", "--commit", "abc"]
    ran = CliRunner().invoke(app, [*asked, "--out", str(out)])
    assert ran.exit_code == 0, ran.output
    found = json.loads(out.read_text())
    assert found["machine"]["commit"] == "abc"
    rows = {row["way"]: row for row in found["cases"]["streams"]["rows"]}
    assert {way: (row["tokens"], set(row["cpu_us_a_token"])) for way, row in rows.items()} == {
        "alone": (8 * 512, {"client", "engine"}),
        "http": (8 * 512, {"client", "engine", "server"}),
    }
