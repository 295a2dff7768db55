"""What the attention benchmark says of what it timed: tables, goals, the file; and its command line without a GPU."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import attention, machine
from benchmarks.attention_cells import Cell
from benchmarks.attention_contenders import REGISTRY
from benchmarks.attention_goal import Goal, Rule
from benchmarks.attention_goals import goals
from benchmarks.attention_grid import SECTIONS
from benchmarks.attention_report import Record, Report, Result
from benchmarks.stopwatch import Call, Stopwatch

CHUNK = Cell("chunk", 1, 512, 131584, 32, 8, 128, True, page=64)
SQUARE = Cell("forward", 1, 8192, 8192, 32, 8, 128, False)


def forward(seqlen: int, head_dim: int = 64, causal: bool = True, **ms: float) -> Record:
    cell = Cell("forward", 1, seqlen, seqlen, 32, 32, head_dim, causal)
    return Record(cell, {name.replace("_", "-"): Result(x) for name, x in ms.items()})


def decode(batch: int, context: int, section: str = "decode", calls: int = 1, **ms: float) -> Record:
    cell = Cell(section, batch, 1, context, 32, 8, 128, False, page=64, calls=calls)
    return Record(cell, {name.replace("_", "-"): Result(x) for name, x in ms.items()})


@pytest.fixture
def report() -> Report:
    report = Report({"gpu": "none"}, {"rounds": 2}, copy_tb_per_s=4.0)
    for seqlen, ours, fa2 in ((2048, 1.0, 0.99), (8192, 1.0, 0.90), (512, 1.0, 0.1)):
        report.records.append(forward(seqlen, longwave=ours / 2, longwave_generic=ours, fa2=fa2))
    cell = Cell("decode", 8, 1, 32768, 32, 8, 128, False, page=64)
    results = {"longwave": Result(cell.kv_bytes / 3.9e9, None, 3e-3), "cudnn": Result(None, "RuntimeError: no kernel")}
    report.records.append(Record(cell, results))
    return report


def goal(records: list[Record], name: str) -> Goal:
    return next(g for g in goals(records, 4.0) if g.name.startswith(name))


def test_the_bar_of_a_cell_is_its_best_peer_of_the_run() -> None:
    records = [forward(2048, longwave=1.0, cudnn=1.2, fa3=1.1), forward(512, longwave=1.0, cudnn=0.9, fa3=1.3)]
    each = goal(records, "forward over its best peer")
    assert each.values == pytest.approx([1.1, 0.9])
    assert each.met is False
    assert "d=64 causal 1x512x512" in str(each)
    assert "1 of 2 cells pass" in str(each)
    mean = goal(records, "forward over its best peer, all cells")
    assert mean.rule is Rule.MEAN
    assert mean.mean == pytest.approx((1.1 * 0.9) ** 0.5)
    assert mean.met is False
    assert goal(records, "forward over cuDNN from 2k up").values == pytest.approx([1.2])


def test_ours_is_never_a_bar() -> None:
    record = forward(2048, longwave=1.0, longwave_generic=0.5, fa2=2.0)
    assert record.best_peer() == "fa2"
    assert forward(2048, longwave=1.0).best_peer() is None
    assert goal([forward(2048, longwave=1.0)], "forward over its best peer").met is None


def test_absolute_goals_are_of_one_cell_at_16k() -> None:
    record = forward(16384, head_dim=128, causal=False, longwave=12.0)
    value = 4 * 32 * 16384**2 * 128 / 12.0 / 1e9
    assert goal([record], "forward d=128 full 16k").values == pytest.approx([value])
    assert goal([record], "forward d=128 causal 16k").values == []


def test_a_twin_counts_its_own_work() -> None:
    record = Record(CHUNK, {"longwave": Result(1.0), "longwave-dense": Result(0.9, twin=SQUARE)})
    share = goal([record], "512 tokens on 131k")
    assert share.values == pytest.approx([0.9 * CHUNK.flops / SQUARE.flops])
    assert share.met is True


def test_backward_goals_compare_ours_with_peers_and_with_itself() -> None:
    cell = Cell("backward", 1, 16384, 16384, 8, 8, 256, True)
    times = {"longwave": 1.0, "longwave-deterministic": 1.25, "longwave-generic": 2.0, "fa2": 1.8, "cudnn": 1.2}
    record = Record(cell, {name: Result(ms, extra_bytes=3 << 20) for name, ms in times.items()})
    assert goal([record], "backward over its best peer").values == pytest.approx([1.2])
    assert goal([record], "backward d=256 over").met is False
    assert goal([record], "deterministic backward").values == pytest.approx([0.8])
    assert goal([record], "generic backward").values == pytest.approx([0.9])
    assert goal([record], "backward d=128 causal 16k").values == []
    report = Report({}, {}, None, [record])
    assert "longwave MiB" in report.table("backward")
    assert Record.of(record.facts()).results["fa2"].extra_bytes == 3 << 20


def test_sparse_and_float8_goals_compare_times() -> None:
    sparse = Cell("block_sparse", 1, 32768, 32768, 16, 16, 128, False, density=0.25)
    dense = Cell("forward", 1, 32768, 32768, 16, 16, 128, False)
    record = Record(sparse, {"longwave": Result(1.0), "longwave-dense": Result(3.5, twin=dense)})
    assert goal([record], "block-sparse").values == pytest.approx([3.5])
    step = decode(1, 131072, "fp8_kv", longwave=1.0, longwave_bf16=1.8)
    assert goal([step], "decode over FP8 KV").met is True


def test_decode_goals(report: Report) -> None:
    records = [
        *report.records,
        decode(1, 1024, longwave=0.01, flashinfer=0.012, fa3=0.009),
        decode(1, 1024, "latency", 32, longwave=0.0071),
        decode(1, 1024, "latency", 1, longwave=0.0121),
        decode(64, 100_600, "shared_prefix", longwave=0.2, flashinfer=6.0, fa3=5.0),
    ]
    share = goal(records, "decode from 100 MB of KV")
    assert share.values == pytest.approx([3.9 / 4.0])
    assert share.met is True
    assert goal(records, "decode over shuffled pages over flashinfer").values == pytest.approx([1.2])
    assert goal(records, "decode over shuffled pages over fa3").met is False
    assert goal(records, "decode over shuffled pages over cuDNN").met is None
    latency = goal(records, "decode 1 x 1k in a graph of 32")
    assert latency.values == pytest.approx([7.1])
    assert latency.met is True
    assert goal(records, "64 requests sharing 100k tokens: times as fast as fa3").values == pytest.approx([25.0])


def test_the_error_of_float8_is_a_share_of_the_plain_ones() -> None:
    cell = Cell("fp8_error", 1, 4096, 4096, 16, 16, 128, False)
    record = Record(cell, {"longwave": Result(1.0, None, 0.02), "per-tensor": Result(1.0, None, 0.05)})
    assert goal([record], "FP8 forward, outliers").values == pytest.approx([0.4])
    assert goal([record], "FP8 forward, outliers").met is True
    assert record.number("longwave") == 0.02


def test_goals_without_a_cell_say_that_they_were_not_measured() -> None:
    empty = goals([], None)
    assert len(empty) >= 20
    assert {g.met for g in empty} == {None}
    assert "not measured" in str(empty[0])
    assert len({g.name for g in empty}) == len(empty)


def test_the_table_has_a_line_per_cell_and_a_dash_for_what_is_missing(report: Report) -> None:
    lines = report.table("forward").splitlines()
    assert len(lines) == 2 + 3
    assert len({len(line) for line in lines[1:]}) == 1
    assert lines[2].split()[-2:] == ["2.00", "1.98"]
    assert report.table("decode").splitlines()[-1].split()[-4:] == ["3.900", "-", "0.97", "-"]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_section_has_a_table(report: Report, section: str) -> None:
    assert report.table(section).startswith(section)


def test_missing_contenders_are_listed_with_their_reason(report: Report) -> None:
    assert report.missing() == ["decode cudnn: 1 cells not timed: RuntimeError: no kernel"]


def test_the_file_holds_every_number_and_null_with_a_reason(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    report.write(path, [g.facts() for g in goals(report.records, report.copy_tb_per_s)])
    content = json.loads(path.read_text())
    assert [path] == list(path.parent.iterdir())
    assert len(content["cells"]) == 4
    assert content["cells"][0]["results"]["fa2"]["tflops"] == pytest.approx(4 * 32 * 2048 * 2048 * 64 / 2 / 0.99 / 1e9)
    assert content["cells"][3]["results"]["cudnn"] == {
        "ms": None,
        "tb_per_s": None,
        "relative_error": None,
        "reason": "RuntimeError: no kernel",
    }
    assert content["copy_tb_per_s"] == 4.0
    assert content["goals"][0]["met"] is False


def test_a_report_comes_back_from_its_file(report: Report, tmp_path: Path) -> None:
    report.records.append(Record(CHUNK, {"longwave": Result(1.0), "longwave-dense": Result(0.9, None, 0.1, SQUARE)}))
    report.write(tmp_path / "results.json")
    again = Report.read(tmp_path / "results.json")
    assert again.records == report.records
    assert again.copy_tb_per_s == 4.0


def test_progress_names_the_cell_and_every_time() -> None:
    line = attention.progress(Record(CHUNK, {"longwave": Result(1.0), "fa3": Result(None, "absent")}))
    assert line == "chunk d=128 causal 1x512x131584 heads 32/8 page 64  longwave 1.0000 ms  fa3 -"


def test_the_machine_is_described_in_plain_json() -> None:
    facts = machine.facts(commit="abc")
    assert json.loads(json.dumps(facts)) == facts
    assert facts["commit"] == "abc"
    assert facts["torch"] == torch.__version__
    assert machine.output("no-such-command") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so_in_one_sentence_and_exits_with_2() -> None:
    result = CliRunner().invoke(_app(), ["forward", "decode", "--quick"])
    assert result.exit_code == 2
    assert result.stderr == "This benchmark times CUDA kernels and torch sees no NVIDIA GPU here.\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--head-dims", "64;128"], "64,128"), (["--only", "fa9"], "fa9"), (["sideways"], "sideways")],
)
def test_an_argument_that_names_nothing_is_refused(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(_app(), arguments)
    assert result.exit_code == 2
    assert said in result.stderr


class InstantWatch(Stopwatch):
    def __post_init__(self) -> None:
        self.device = torch.device("cpu")

    def times(self, calls: Sequence[Call]) -> list[float]:
        return [1.0 for call in calls if call() is not None]


@pytest.fixture
def small_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line's way on the CPU: two small cells, a clock that takes no time."""
    cells = [
        Cell("forward", 1, 256, 256, 2, 2, 16, True),
        Cell("varlen", 2, 40, 40, 2, 2, 16, True, lengths=(40, 7)),
    ]
    monkeypatch.setattr(attention, "select", lambda sections, *_: [c for c in cells if c.section in sections])
    monkeypatch.setattr(attention, "Stopwatch", InstantWatch)
    monkeypatch.setattr(attention, "copy_bandwidth", lambda _: 4.0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    facts = machine.facts("abc")
    monkeypatch.setattr(machine, "facts", lambda commit: facts | {"commit": commit})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.usefixtures("small_gpu")
def test_a_run_writes_its_file_and_says_which_goals_are_met(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    arguments = [
        "--only",
        "longwave,longwave-dense",
        "--no-ahead",
        "--out",
        str(out),
        "--commit",
        "abc",
        "--rounds",
        "1",
    ]
    result = CliRunner().invoke(_app(), arguments)
    assert result.exit_code == 0, result.output
    report = Report.read(out)
    assert [str(r.cell) for r in report.records] == [
        "forward d=16 causal 1x256x256 heads 2",
        "varlen d=16 causal 2x40x40 heads 2 2 lengths",
    ]
    assert report.machine["commit"] == "abc"
    assert report.options["rounds"] == 1
    assert "varlen over the same FLOPs dense, each at least 0.95: worst" in result.output


@pytest.mark.usefixtures("small_gpu")
def test_a_run_without_a_result_of_ours_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_cell: Cell, _t: object) -> Call:
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(REGISTRY["longwave"].makes, "forward", broken)
    result = CliRunner().invoke(_app(), ["forward", "--only", "longwave", "--no-ahead"])
    assert result.exit_code == 1
    assert "forward longwave: 1 cells not timed: RuntimeError: no such kernel" in result.output


def test_peers_are_listed_without_a_gpu() -> None:
    result = CliRunner().invoke(_app(), ["--peers"])
    assert result.exit_code == 0
    assert result.stdout.startswith("peers found: ")
    assert "fa3" in result.stdout


def _app() -> typer.Typer:
    app = typer.Typer()
    app.command()(attention.main)
    return app
