"""The attention benchmark without a GPU: counting, checks, the table, the goals, the file, and the refusal to run."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import attention, machine
from benchmarks.attention_cells import Cell, decode_cells, forward_cells, paged_cells, quick, select
from benchmarks.attention_contenders import FA2, OURS, OURS_GENERIC, REGISTRY, Contender, Tensors, relative_error
from benchmarks.attention_report import Record, Report, Result
from benchmarks.stopwatch import Call, Stopwatch, alternate, repeats

CPU = torch.device("cpu")
SMALL = Cell("forward", 2, 24, 24, 4, 2, 16, True)
SMALL_DECODE = Cell("decode", 3, 1, 128, 4, 2, 16, False, page=64)
SMALL_CHUNK = Cell("paged", 1, 40, 128, 4, 2, 16, True, page=64)


@pytest.fixture
def report() -> Report:
    report = Report({"gpu": "none"}, {"rounds": 2}, OURS, OURS_GENERIC, FA2, copy_tb_per_s=4.0)
    for seqlen, ours, fa2 in ((2048, 1.0, 0.99), (8192, 1.0, 0.90), (512, 1.0, 0.1)):
        cell = Cell("forward", 1, seqlen, seqlen, 32, 32, 64, True)
        report.records.append(Record(cell, {OURS: Result(ours / 2), OURS_GENERIC: Result(ours), FA2: Result(fa2)}))
    decode = Cell("decode", 8, 1, 32768, 32, 8, 128, False, page=64)
    results = {OURS: Result(decode.kv_bytes / 3.6e9, None, 3e-3), "cudnn": Result(None, "RuntimeError: no kernel")}
    report.records.append(Record(decode, results))
    return report


def test_a_full_forward_counts_four_operations_a_pair_and_element() -> None:
    assert Cell("forward", 2, 100, 200, 8, 4, 64, False).flops == 4 * 2 * 8 * 100 * 200 * 64


def test_a_causal_square_counts_half() -> None:
    full = Cell("forward", 1, 2048, 2048, 32, 32, 64, False)
    assert replace(full, causal=True).flops * 2 == full.flops


def test_a_chunk_on_a_prefix_counts_the_prefix_fully() -> None:
    chunk = Cell("paged", 1, 100, 300, 1, 1, 1, True)
    assert chunk.flops == 4 * (100 * 200 + 100 * 100 // 2)


def test_kv_bytes_are_keys_and_values_in_two_bytes() -> None:
    assert Cell("decode", 16, 1, 131072, 32, 8, 128, False).kv_bytes == 16 * 131072 * 8 * 128 * 2 * 2


def test_the_forward_grid_is_the_published_one() -> None:
    cells = list(forward_cells())
    assert len(cells) == 3 * 2 * 7 + 6
    assert Cell("forward", 32, 512, 512, 32, 32, 64, True) in cells
    assert Cell("forward", 1, 32768, 32768, 8, 8, 256, False) in cells
    assert Cell("forward", 1, 8192, 8192, 32, 8, 128, True) in cells


def test_every_cell_fills_whole_pages() -> None:
    assert all(c.seqlen_k % c.page == 0 for c in [*decode_cells(), *paged_cells()])


def test_quick_keeps_cells_of_every_section() -> None:
    assert {c.section for c in quick(select(("forward", "decode", "paged"), None, None))} == {
        "forward",
        "decode",
        "paged",
    }


def test_choosing_dimensions_narrows_the_grid() -> None:
    cells = select(("forward", "decode"), [64], [8192])
    assert {(c.head_dim, c.seqlen_k) for c in cells} == {(64, 8192)}
    assert {c.section for c in cells} == {"forward", "decode"}


def test_small_inputs_rotate_and_large_ones_do_not() -> None:
    assert attention.input_sets(SMALL) == 8
    assert attention.input_sets(Cell("decode", 16, 1, 131072, 32, 8, 128, False, page=64)) == 1


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        (name, cell)
        for name in ("longwave", "longwave-contiguous")
        for cell in (SMALL, SMALL_DECODE, SMALL_CHUNK)
        if cell.section in REGISTRY[name].sections
    ],
    ids=lambda x: x if isinstance(x, str) else x.section,
)
def test_our_contenders_are_right_on_cpu(name: str, cell: Cell) -> None:
    calls, result = attention.prepare(cell, [Tensors.random(cell, CPU)], REGISTRY[name])
    assert len(calls) == 1, result.reason
    assert result.error is not None
    assert result.error <= attention.TOLERANCE


def test_pages_and_contiguous_keys_are_the_same_keys() -> None:
    t = Tensors.random(SMALL_DECODE, CPU)
    assert t.k_pages is not None
    assert t.block_table is not None
    block = int(t.block_table[2, 1])
    assert torch.equal(t.k[2, 64 + 5, 1], t.k_pages[block, 1, 5])


def test_the_error_of_a_wrong_mask_is_large_and_of_nan_is_nan() -> None:
    t = Tensors.random(SMALL, CPU)
    unmasked = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (t.q, t.k, t.v)), enable_gqa=True
    ).transpose(1, 2)
    assert relative_error(SMALL, t, unmasked) > 0.1
    assert math.isnan(relative_error(SMALL, t, torch.full_like(t.q, torch.nan)))


def _broken(_cell: Cell, _t: Tensors) -> Call:
    raise NotImplementedError("no kernel for this\nand a long story")


def _wrong(_cell: Cell, t: Tensors) -> Call:
    return lambda: torch.full_like(t.q, torch.nan)


@pytest.mark.parametrize(
    ("make", "reason"),
    [(_broken, "NotImplementedError: no kernel for this"), (_wrong, "wrong result: relative error nan")],
)
def test_a_contender_that_fails_is_recorded_with_its_reason(make: object, reason: str) -> None:
    contender = Contender("peer", ("forward",), make)  # type: ignore[arg-type]
    calls, result = attention.prepare(SMALL, [Tensors.random(SMALL, CPU)], contender)
    assert calls == []
    assert result == Result(None, reason)


class InstantWatch(Stopwatch):
    """Runs every call once and says it took a millisecond."""

    def __post_init__(self) -> None:
        self.runs = 0

    def times(self, calls: Sequence[Call]) -> list[float]:
        for call in calls:
            call()
            self.runs += 1
        return [1.0] * len(calls)


@pytest.mark.parametrize("cell", [SMALL, SMALL_DECODE, SMALL_CHUNK], ids=lambda c: c.section)
def test_a_cell_is_timed_on_every_input_set_and_reported(cell: Cell, report: Report, tmp_path: Path) -> None:
    watch = InstantWatch(CPU)
    contenders = [REGISTRY["longwave"], Contender("peer", (cell.section,), _broken), Contender("other", ("x",), _wrong)]
    record = attention.time_cell(cell, contenders, watch, rounds=2)
    assert watch.runs == 2 * attention.input_sets(cell)
    assert record.results["longwave"].ms == 1.0
    assert record.results["peer"].reason == "NotImplementedError: no kernel for this"
    assert "other" not in record.results
    assert "longwave 1.0000 ms" in attention.progress(record)
    report.records.append(record)
    report.write(tmp_path / "results.json")
    assert "longwave" in report.table(cell.section)


def test_contenders_take_turns_and_the_median_of_all_rounds_counts() -> None:
    order: list[str] = []
    samples = iter([[1.0, 9.0], [4.0], [3.0, 2.0], [6.0]])

    def times(calls: Sequence[Call]) -> list[float]:
        calls[0]()
        return next(samples)

    calls = {name: [lambda name=name: order.append(name)] for name in ("a", "b")}
    assert alternate(calls, times, rounds=2) == {"a": 2.5, "b": 5.0}
    assert order == ["a", "b", "a", "b"]


def test_a_contender_that_raises_leaves_the_race_and_the_others_stay() -> None:
    error = RuntimeError("out of memory")

    def times(calls: Sequence[Call]) -> list[float]:
        calls[0]()
        return [1.0]

    def fail() -> None:
        raise error

    assert alternate({"bad": [fail], "good": [lambda: None]}, times, rounds=2) == {"bad": error, "good": 1.0}


def test_repeats_follow_the_budget_within_limits() -> None:
    assert (repeats(50, 1.0), repeats(50, 100.0), repeats(50, 1e-4)) == (50, 3, 1000)


def test_goals_take_the_worst_cell_of_their_lengths(report: Report) -> None:
    goals = {g.name: g for g in report.goals()}
    causal = goals["generic forward / FA2, d=64 causal, 2k to 16k"]
    assert causal.values == pytest.approx([0.99, 0.90])
    assert causal.met is False
    assert "worst 0.900" in str(causal)
    assert goals["generic forward / FA2, d=128 full, 2k to 16k"].met is None
    assert goals["decode 8 x 32768, share of copy bandwidth"].values == pytest.approx([0.9])
    assert goals["decode 8 x 32768, share of copy bandwidth"].met is True


def test_the_table_has_a_line_per_cell_and_a_dash_for_what_is_missing(report: Report) -> None:
    lines = report.table("forward").splitlines()
    assert len(lines) == 2 + 3
    assert len({len(line) for line in lines[1:]}) == 1
    assert lines[2].split()[-2:] == ["2.00", "1.98"]
    decode = report.table("decode").splitlines()[-1].split()
    assert decode[-4:] == ["3.600", "-", "0.90", "-"]


def test_missing_contenders_are_listed_with_their_reason(report: Report) -> None:
    assert report.missing() == ["decode cudnn: 1 cells not timed: RuntimeError: no kernel"]


def test_the_file_holds_every_number_and_null_with_a_reason(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    report.write(path)
    content = json.loads(path.read_text())
    assert [path] == list(path.parent.iterdir())
    assert len(content["cells"]) == 4
    assert content["cells"][0]["results"][FA2]["tflops"] == pytest.approx(4 * 32 * 2048 * 2048 * 64 / 2 / 0.99 / 1e9)
    assert content["cells"][3]["results"]["cudnn"] == {
        "ms": None,
        "tb_per_s": None,
        "relative_error": None,
        "reason": "RuntimeError: no kernel",
    }
    assert content["copy_tb_per_s"] == 4.0


def test_the_machine_is_described_in_plain_json() -> None:
    facts = machine.facts(commit="abc")
    assert json.loads(json.dumps(facts)) == facts
    assert facts["commit"] == "abc"
    assert facts["torch"] == torch.__version__
    assert machine.output("no-such-command") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so_in_one_sentence_and_exits_with_2() -> None:
    result = CliRunner().invoke(_app(), ["forward", "--quick"])
    assert result.exit_code == 2
    assert result.stderr == "This benchmark times CUDA kernels and torch sees no NVIDIA GPU here.\n"


def test_a_list_of_dimensions_that_is_none_is_refused() -> None:
    result = CliRunner().invoke(_app(), ["--head-dims", "64;128"])
    assert result.exit_code == 2
    assert "64,128" in result.stderr


def _app():  # type: ignore[no-untyped-def]
    import typer

    app = typer.Typer()
    app.command()(attention.main)
    return app
