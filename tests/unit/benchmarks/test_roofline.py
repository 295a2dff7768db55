"""The roofline without a GPU: counting, the methods' results on the CPU, the table, the goal, the file, the plot."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import hbm_probe, roofline, roofline_ours, roofline_plot
from benchmarks.hbm_counters import CountersUnavailableError, HbmBytes
from benchmarks.roofline_counts import (
    DOCUMENTS,
    RABE_STAATS_KEYS,
    RABE_STAATS_ROWS,
    Shape,
    rabe_staats_bytes,
    standard_bytes,
    standard_memory,
)
from benchmarks.roofline_methods import DECODE, HOPPER, METHODS, OURS, RABE_STAATS, REQUESTS, STANDARD, random_tensors
from benchmarks.roofline_ours import NotServedError
from benchmarks.roofline_report import Report, Row
from benchmarks.stopwatch import Stopwatch

CPU = torch.device("cpu")


def row(method: str, seqlen: int, *, causal: bool = False, **fields: Any) -> Row:
    chosen = METHODS[method]
    shape = chosen.shape(seqlen, causal)
    return Row(method, chosen.title, shape, chosen.work(shape), **fields)


@pytest.fixture
def report() -> Report:
    report = Report({"gpu": "none", "commit": "0" * 40, "date": "2026-01-01T00:00:00"}, HOPPER, STANDARD, 750.0, 4.0)
    for seqlen in (4096, 16384):
        least = Shape(seqlen, seqlen).least_bytes
        counters = HbmBytes(least, least // 2, 1)
        report.rows.append(row(STANDARD, seqlen, ms=seqlen / 1e3, extra_bytes=2**20, error=3e-3))
        report.rows.append(row(HOPPER, seqlen, ms=seqlen / 1e4, extra_bytes=64, error=3e-3, counters=counters))
        report.rows.append(row(HOPPER, seqlen, causal=True, ms=seqlen / 2e4, extra_bytes=64, error=3e-3))
        report.rows.append(row(DECODE, seqlen, ms=0.01, extra_bytes=0, error=3e-3))
    report.rows.append(row(STANDARD, 65536, reason="does not fit: 275 GB of scores and weights, 140 GB free"))
    return report


def test_flops_are_four_a_pair_and_element_and_half_of_it_under_a_causal_mask() -> None:
    assert Shape(100, 100, heads=2, head_dim=8).flops == 4 * 2 * 100 * 100 * 8
    assert Shape(100, 100, heads=2, head_dim=8, causal=True).flops == 2 * 2 * 100 * 100 * 8


def test_standard_attention_computes_masked_scores_too() -> None:
    causal = Shape(64, 64, causal=True)

    assert METHODS[STANDARD].work(causal).done == 2 * causal.flops
    assert METHODS[HOPPER].work(causal).done == causal.flops


def test_the_least_is_four_tensors_once() -> None:
    assert Shape(16384, 16384).least_bytes == 4 * 16 * 16384 * 128 * 2


def test_standard_attention_moves_the_scores_four_times() -> None:
    shape = Shape(1024, 1024)

    assert standard_bytes(shape) - shape.least_bytes == 4 * 16 * 1024 * 1024 * 2


def test_standard_attention_needs_34_gigabytes_of_scores_at_32k() -> None:
    assert Shape(32768, 32768).scores_bytes == 34_359_738_368
    assert standard_memory(Shape(65536, 65536)) > 141e9  # an H200's memory


def test_rabe_staats_moves_more_than_standard_attention_without_fusion() -> None:
    shape = Shape(16384, 16384)

    assert standard_bytes(shape) < rabe_staats_bytes(shape) < 3 * standard_bytes(shape)


def test_decode_is_one_row_on_all_keys() -> None:
    shape = METHODS[DECODE].shape(4096, causal=False)

    assert (shape.rows, shape.keys) == (1, 4096)
    assert shape.flops / shape.least_bytes == pytest.approx(1.0, rel=1e-3)


def test_what_other_formulas_cost() -> None:
    shape = Shape(4096, 4096)
    tensor = 16 * 4096 * 128 * 2

    assert METHODS["documents"].work(shape).flops * DOCUMENTS == shape.flops
    assert METHODS["backward"].work(shape).least_bytes == 8 * tensor
    assert METHODS["backward"].work(shape).flops == 2.5 * shape.flops
    assert METHODS["fp8"].work(shape).counted == (4 + 3) * tensor
    assert METHODS["float32"].work(shape).least_bytes == 8 * tensor
    assert METHODS["linear"].work(shape).flops == 4 * 16 * 4096 * 128 * 128
    assert METHODS["linear"].work(Shape(4096, 4096, causal=True)).counted == 6 * tensor
    one = METHODS["decode-fp8"].shape(4096, causal=False)
    assert METHODS["decode-fp8"].work(one).least_bytes == tensor + one.least_bytes - 2 * tensor
    assert METHODS["shared-prefix"].shape(4096, causal=False).rows == REQUESTS


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", ["documents", "linear", "float32", HOPPER])
def test_what_runs_on_a_cpu_meets_its_truth(method: str, causal: bool) -> None:
    """`hopper` is refused there."""
    chosen = METHODS[method]
    shape = replace(chosen.shape(512, causal), heads=2, head_dim=64)
    tensors = random_tensors(shape, CPU)
    if method == HOPPER:
        with pytest.raises(NotServedError, match="cpu_reference"):
            chosen.make(shape, tensors)
        return

    assert roofline.relative_error(chosen.make(shape, tensors)(), chosen.truth(shape, tensors)) < chosen.tolerance


def test_shared_keys_and_gradients_meet_their_truth() -> None:
    chosen = METHODS["shared-prefix"]
    shape = replace(chosen.shape(256, causal=False), heads=2, head_dim=64)
    tensors = random_tensors(shape, CPU)
    with pytest.raises(NotServedError, match="fill no pages"):
        chosen.make(replace(shape, keys=200), tensors)
    assert roofline.relative_error(chosen.make(shape, tensors)(), chosen.truth(shape, tensors)) < chosen.tolerance

    shape = Shape(70, 70, heads=2, head_dim=64, causal=True)
    tensors = random_tensors(shape, CPU)
    exact = roofline_ours.backward_by("cpu_reference_backward")(shape, tensors)()
    assert roofline.relative_error(exact, METHODS["backward"].truth(shape, tensors)) < METHODS["backward"].tolerance


@pytest.mark.parametrize("causal", [False, True])
def test_standard_attention_is_sdpa(causal: bool) -> None:
    shape = Shape(48, 48, heads=2, head_dim=16, causal=causal)
    tensors = random_tensors(shape, CPU)

    standard = METHODS[STANDARD]
    outputs = standard.make(shape, tensors)()

    assert outputs[0].shape == tensors[0].shape
    assert roofline.relative_error(outputs, standard.truth(shape, tensors)) < standard.tolerance


def test_rabe_staats_in_parts_is_sdpa() -> None:
    shape = Shape(RABE_STAATS_ROWS + 5, RABE_STAATS_KEYS + 3, heads=1, head_dim=16)
    tensors = random_tensors(shape, CPU)

    parts = METHODS[RABE_STAATS]

    assert roofline.relative_error(parts.make(shape, tensors)(), parts.truth(shape, tensors)) < parts.tolerance


@pytest.mark.parametrize("method", [RABE_STAATS, DECODE])
def test_a_method_without_a_causal_case_is_measured_full_only(method: str) -> None:
    assert [shape.mask for shape in METHODS[method].shapes([64, 128])] == ["full", "full"]
    with pytest.raises(NotServedError):
        METHODS[method].shape(64, causal=True)


def test_the_others_are_measured_full_and_causal() -> None:
    masks = [(shape.rows, shape.mask) for shape in METHODS[HOPPER].shapes([64, 128])]

    assert masks == [(64, "full"), (128, "full"), (64, "causal"), (128, "causal")]


def test_a_result_with_nan_has_an_infinite_error() -> None:
    good, bad = torch.ones(3), torch.tensor([1.0, torch.nan, 1.0])

    assert roofline.relative_error((good,), (good,)) == 0
    assert roofline.relative_error((good, bad), (good, good)) == float("inf")


def test_intensity_is_flops_over_the_bytes_that_the_row_says() -> None:
    counted = row(HOPPER, 4096)
    measured = replace(counted, counters=HbmBytes(3 * counted.work.least_bytes, counted.work.least_bytes, 1))

    assert counted.hbm_source == "counted"
    assert measured.hbm_source == "counters"
    assert counted.times_least == 1
    assert measured.times_least == 4
    assert measured.intensity == counted.intensity / 4


def test_the_goal_needs_the_counters(report: Report) -> None:
    assert report.goal["times_least"] == 1.5
    assert report.goal["met"] is True
    assert "met" in report.goal_line()
    assert "standard" in report.goal_line()

    report.rows = [replace(r, counters=None) for r in report.rows]

    assert report.goal["met"] is None
    assert "not measured" in report.goal_line()


def test_a_forward_that_reads_too_much_misses_the_goal(report: Report) -> None:
    report.rows = [replace(r, counters=HbmBytes(3 * r.shape.least_bytes, 0, 1)) for r in report.rows]

    assert report.goal["met"] is False
    assert "MISSED" in report.goal_line()


def test_the_table_has_a_line_a_row_and_says_why_one_is_missing(report: Report) -> None:
    lines = report.table().splitlines()

    assert len(lines) == 1 + len(report.rows)
    assert "does not fit: 275 GB" in lines[-1]


def test_the_file_has_every_row(report: Report, tmp_path: Path) -> None:
    report.write(tmp_path / "results" / "roofline.json")

    content = json.loads((tmp_path / "results" / "roofline.json").read_text())

    assert len(content["rows"]) == len(report.rows)
    assert content["ceilings"] == {"matmul_tflops": 750.0, "copy_tb_per_s": 4.0}
    assert content["rows"][1]["hbm_source"] == "counters"


def test_the_probes_are_the_timed_full_rows_at_the_chosen_lengths(report: Report) -> None:
    assert roofline.probes_of((STANDARD, HOPPER), report.rows) == [
        "standard:4096:full",
        "hopper:4096:full",
        "standard:16384:full",
        "hopper:16384:full",
    ]


def test_counters_reach_their_rows_and_what_fails_is_said(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    report.rows = [replace(r, counters=None) for r in report.rows]
    report.rows.append(row(RABE_STAATS, 4096, ms=1.0, extra_bytes=1))

    def measure(probes: list[str], ncu: str) -> dict[str, HbmBytes]:
        if probes[0].startswith(RABE_STAATS):
            raise CountersUnavailableError("ncu: timed out")
        return {probe: HbmBytes(100, 10, 1) for probe in probes}

    monkeypatch.setattr(roofline, "measure", measure)
    roofline.read_counters(report, "ncu")

    assert report.missing_counters == ["rabe-staats:4096:full: ncu: timed out"]
    counted = {(r.method, r.shape.keys, r.shape.mask) for r in report.rows if r.counters}
    assert counted == {(m, n, "full") for m in (STANDARD, HOPPER, DECODE) for n in (4096, 16384)}


@pytest.mark.parametrize("probe", ["hopper", "nobody:64:full", "hopper:64:diagonal", "hopper:many:full"])
def test_what_is_no_probe_is_refused(probe: str) -> None:
    with pytest.raises(ValueError):
        hbm_probe.prepare(probe, CPU)


def test_the_plot_is_a_png_of_a_written_file(report: Report, tmp_path: Path) -> None:
    report.write(tmp_path / "roofline.json")

    assert roofline_plot.main([str(tmp_path / "roofline.json"), str(tmp_path / "plots" / "roofline.png")]) == 0
    assert (tmp_path / "plots" / "roofline.png").read_bytes().startswith(b"\x89PNG")


def test_the_plot_leaves_out_what_has_no_time_and_no_memory(report: Report) -> None:
    rows = report.content()["rows"]

    times = dict(roofline_plot.series(roofline_plot.full(rows), "ms"))
    memory = {title for title, _ in roofline_plot.series(rows, "extra_bytes")}

    assert [keys for keys, _ in times[METHODS[STANDARD].title]] == [4096, 16384]
    assert [ms for _, ms in times[METHODS[HOPPER].title]] == [0.4096, 1.6384]  # not the causal ones
    assert memory == {METHODS[STANDARD].title, METHODS[HOPPER].title}


def test_every_method_has_a_colour_of_its_own() -> None:
    rows = [{"title": method.title} for method in METHODS.values()]

    assert len(set(roofline_plot.colours(rows).values())) == len(METHODS)


def test_the_plot_wants_two_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert roofline_plot.main([]) == 2
    assert "roofline.json" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_the_script_says_so() -> None:
    from typer import Typer

    app = Typer()
    app.command()(roofline.main)

    result = CliRunner().invoke(app, [])

    assert result.exit_code == 2
    assert "no NVIDIA GPU" in result.output


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_a_method_is_right_and_measured_on_the_gpu(method: str) -> None:
    watch = Stopwatch(torch.device("cuda", torch.cuda.current_device()), warm_up_ms=0.1, repeat_ms=0.1)

    for shape in METHODS[method].shapes([1024]):
        measured = roofline.row_of(METHODS[method], shape, watch)

        assert not measured.wrong, measured.reason
        assert measured.reason is None or METHODS[method] in OURS
        assert measured.ms is None or measured.extra_bytes is not None
