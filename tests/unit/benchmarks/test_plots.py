"""The README's plots and tables are drawn from result files, of several runs together."""

import json
from pathlib import Path

import pytest

from benchmarks import attention_results, attention_tables, plots, readme_tables
from benchmarks.attention_cells import Cell
from benchmarks.attention_grid import decode_cells, forward_cells, fp8_forward_cells
from benchmarks.attention_report import Record, Report, Result
from benchmarks.markdown import origin

MACHINE = {
    "gpu": "a GPU",
    "driver": "1",
    "torch": "2",
    "cupy": "3",
    "commit": "0123456789abcdef",
    "date": "2026-11-21T12:00:00+00:00",
}
NEWER = MACHINE | {"date": "2026-11-22T12:00:00+00:00"}


def run(
    cells: list[Cell], packages: dict[str, str] | None = None, machine: dict[str, str] = MACHINE, **ms: float | str
) -> Report:
    """`ms`: the time of every cell, or why there is none."""
    results = {name: Result(None, x) if isinstance(x, str) else Result(x, None, 1e-3) for name, x in ms.items()}
    return Report(machine, {"peers": packages or {}}, 4.2, [Record(cell, results) for cell in cells])


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Two runs, each with other peers; ours is slower in the second, which is the newer."""
    folder = tmp_path / "results"
    cells = [*forward_cells(), *decode_cells()]
    run(cells, longwave=1.0, cudnn=1.2, fa3=1.1).write(folder / "attention_a.json")
    run(cells, machine=NEWER, longwave=2.0, cudnn=1.9, flashinfer=2.6, fa4=2.2).write(folder / "attention_b.json")
    return folder


def test_peers_stand_beside_ours_of_their_own_run(results: Path) -> None:
    row = attention_results.rows(attention_results.runs(results), "decode")[0]
    assert row.ratios == pytest.approx({"cudnn": 0.95, "fa3": 1.1, "flashinfer": 1.3, "fa4": 1.1})
    assert row.best_peer() == "cudnn"
    assert row.peer("flashinfer") == pytest.approx(row.ours / 1.3)


def test_a_newer_run_of_one_cell_changes_that_cell_and_no_order(results: Path) -> None:
    cells = list(forward_cells())
    later = NEWER | {"date": "2026-11-23T12:00:00+00:00"}
    run(cells[-1:], machine=later, longwave=1.0, fa3=0.9).write(results / "attention_c.json")
    rows = attention_results.rows(attention_results.runs(results), "forward")
    assert [row.cell for row in rows] == cells
    assert rows[-1].ratios == pytest.approx({"fa3": 0.9, "cudnn": 0.95, "flashinfer": 1.3, "fa4": 1.1})
    goals = {goal.name: goal for goal in attention_results.all_goals(attention_results.runs(results))}
    best = goals["forward over its best peer"]
    values = dict(zip(best.cells, best.values, strict=True))
    assert values[str(cells[-1])] == pytest.approx(0.9)
    assert values[str(cells[0])] == pytest.approx(0.95)


def test_goals_of_several_runs_are_one_line_each(results: Path) -> None:
    found = {goal.name: goal for goal in attention_results.all_goals(attention_results.runs(results))}
    over = found["decode over shuffled pages over cuDNN's contiguous decode"]
    assert over.values == pytest.approx([0.95] * 8)  # each cell once, as in the newest run
    assert over.met is False


def test_the_summary_has_the_mean_over_each_peer_of_its_own_run(results: Path) -> None:
    text = attention_tables.kernels(results)
    assert text is not None
    assert "| our speed over that of | cells | cuDNN | FA3 | FA4 | FlashInfer |" in text
    assert "| 48 | 0.95 | 1.10 | 1.10 | 1.30 |" in text  # forward
    assert "backward" not in text


def test_the_summary_says_of_how_many_cells_a_mean_is_where_not_of_all(results: Path) -> None:
    for file in results.glob("attention_*.json"):
        content = json.loads(file.read_text())
        forward = [cell for cell in content["cells"] if cell["section"] == "forward"]
        for cell in forward[:8]:
            cell["results"].pop("fa4", None)
        file.write_text(json.dumps(content))
    text = attention_tables.kernels(results)
    assert text is not None
    assert "| 48 | 0.95 | 1.10 | 1.10 (40) | 1.30 |" in text


def test_eight_bits_stand_beside_a_peer_that_is_faster_too(tmp_path: Path) -> None:
    cells = [cell for cell in fp8_forward_cells() if (cell.head_dim, cell.seqlen_q, cell.causal) == (128, 16384, False)]
    ms = {"longwave": 2.0, "longwave-kernel": 1.5, "longwave-bf16": 2.5, "fa3": 1.2}
    run(cells, {"fa3": "fa3 3"}, **ms).write(tmp_path / "attention_fp8.json")
    text = attention_tables.fp8(tmp_path) or ""
    flops = cells[0].flops
    rates = [f"{flops / ms[name] / 1e9:,.0f}" for name in ("longwave-kernel", "longwave", "fa3", "longwave-bf16")]
    assert f"| 128 | full | 16384 | 1 x 16 | {' | '.join(rates)} | 0.80 |" in text
    assert attention_tables.fp8(tmp_path / "nothing") is None


def test_plots_are_drawn_at_800_pixels_twice_over(results: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    paths = plots.draw(results, tmp_path / "img")
    assert [p.name for p in paths] == ["attention_forward.png", "attention_decode.png"]
    for path in paths:
        image = imread(path)
        assert image.shape[1] == 1600
        assert image[0, 0, :3].min() == 1.0  # a light background


def test_nothing_is_drawn_of_nothing(tmp_path: Path) -> None:
    assert plots.draw(tmp_path, tmp_path / "img") == []


def test_tables_name_the_best_peer_and_every_goal(results: Path) -> None:
    forward = attention_tables.forward(results)
    assert forward is not None
    assert "| 64 | causal | 512 | 32 x 32 |" in forward
    assert "| cuDNN " in forward
    decode = attention_tables.decode(results)
    assert decode is not None
    assert "ours / FlashInfer | ours / FA3 | ours / FA4 | ours / cuDNN, contiguous |" in decode
    assert "| 1.30 | 1.10 | 1.10 | 0.95 |" in decode
    goals = attention_tables.goals(results)
    assert goals is not None
    assert "| forward over its best peer | ≥ 1 | 0.950 | 0.950 | 48 | no |" in goals


def test_tables_name_the_versions_of_peers_and_why_one_was_not_timed(tmp_path: Path) -> None:
    package, reason = {"fa3": "fa3-package 3.0", "fa4": "fa4-package 4.0"}, "RuntimeError: no backward\nand more"
    short, long = [cell for cell in forward_cells() if cell.seqlen_k in (512, 2048)][:2]
    run([short], package, longwave=1.0, cudnn=1.2, fa3=reason, fa4=reason).write(tmp_path / "attention_a.json")
    run([long], package, longwave=1.0, cudnn=1.2, fa3=reason, fa4=1.1).write(tmp_path / "attention_b.json")
    text = attention_tables.forward(tmp_path)
    assert text is not None
    said = text.partition("\n")[0].partition("peers timed: ")[2]
    assert said == 'cuDNN, FA4 (fa4-package 4.0); not timed: FA3 (fa3-package 3.0): "RuntimeError: no backward"'


def test_a_commit_keeps_its_mark() -> None:
    assert "commit 0123456789, " in origin({"machine": MACHINE})
    assert "commit 0123456789 with changes, " in origin({"machine": MACHINE | {"commit": "0123456789abc with changes"}})


def test_a_table_without_results_or_markers_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme_tables, "RESULTS", tmp_path)
    text = "before\n<!-- goals -->\nas it was\n<!-- /goals -->\nafter\n"
    assert readme_tables.rewritten(text) == text
    with pytest.raises(SystemExit, match="goals"):
        readme_tables.rewritten(text.replace("<!-- /goals -->", ""))


def test_a_cell_in_which_ours_failed_meets_nothing_and_has_no_older_number(results: Path) -> None:
    newest = MACHINE | {"date": "2026-11-23T12:00:00+00:00"}
    cells = list(forward_cells())
    run(cells[:1], machine=newest, longwave="wrong result", cudnn=1.9).write(results / "attention_c.json")
    runs = attention_results.runs(results)
    assert len(attention_results.rows(runs, "forward")) == len(cells) - 1
    goal = {goal.name: goal for goal in attention_results.all_goals(runs)}["forward over its best peer, all cells"]
    assert (len(goal.cells), list(goal.failed), goal.met) == (len(cells) - 1, [str(cells[0])], False)
    assert f"ours failed: {cells[0]}" in str(goal)
    assert "| forward over its best peer, all cells | mean ≥ 1.03 |" in (attention_tables.goals(results) or "")
    assert f"| {len(cells) - 1}, 1 failed | no |" in (attention_tables.goals(results) or "")
