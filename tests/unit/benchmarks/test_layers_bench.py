"""The benchmark of fused layers without a GPU: contenders compute the same, bytes are counted, wrong results told."""

from dataclasses import replace

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import layers as bench
from benchmarks.layers import Row, Sizes

SMALL = Sizes(width=64, heads=4, kv_heads=2, head_dim=32, gated_width=96)
CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", [1, 70])
def test_plain_torch_computes_what_the_layers_compute(rows: int) -> None:
    found = list(bench.layers_of(SMALL, CPU))
    assert [layer.name for layer in found] == ["rms_norm", "add_rms_norm", "rotary_store", "gated_activation"]
    assert [bench.wrong(layer, layer.inputs(rows)) for layer in found] == [None] * 4


def test_a_wrong_result_is_told() -> None:
    layer = next(iter(bench.layers_of(SMALL, CPU)))
    off = replace(layer, ours=lambda x: layer.ours(x) * 2)
    assert "rms_norm of 3 rows: relative error 1.00e+00" in (bench.wrong(off, layer.inputs(3)) or "")


def test_rates_count_what_must_be_moved_and_the_table_shows_them() -> None:
    row = Row("rms_norm", 8192, {"ours": 40.0, "torch": 160.0, "compiled": 60.0}, 134_217_728)
    assert row.facts["tb_per_s"]["ours"] == pytest.approx(3.355, abs=1e-3)
    shown = " ".join(bench.table([row]).splitlines()[1].split())
    assert shown == "rms_norm 8192 40.00 160.00 60.00 3.36 4.00 1.50"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    app = typer.Typer()
    app.command()(bench.main)
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2
    assert "no NVIDIA GPU" in result.output
