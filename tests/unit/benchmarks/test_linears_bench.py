"""The benchmark of linear layers of few rows without a GPU: contenders compute the same, rates count the weights."""

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import linears as bench
from benchmarks.linears import CONTENDERS, Row

CPU = torch.device("cpu")


def test_every_contender_computes_the_same() -> None:
    model = [bench.weights_of(64, 96, 128, CPU) for _ in range(2)]
    x, residual = (torch.randn(7, 64, dtype=torch.bfloat16) for _ in range(2))
    outs = [bench.run(x, residual, model, chosen) for chosen in CONTENDERS.values()]
    assert set(CONTENDERS) == {"torch", "ours", *bench.PRODUCTS}
    for out in outs:
        torch.testing.assert_close(out, outs[0], rtol=2e-2, atol=2e-2)


def test_rates_count_the_weights_and_the_table_shows_what_each_product_gives() -> None:
    row = Row(
        8, {"torch": 120.0, "ours": 100.0, "qkv": 118.0, "out": 119.0, "gate_up": 110.0, "down": 113.0}, 436 * 10**6
    )
    assert row.facts["tb_per_s"]["ours"] == pytest.approx(4.36)
    shown = " ".join(bench.table([row]).splitlines()[1].split())
    assert shown == "8 120.0 100.0 1.200 4.36 118.0 119.0 110.0 113.0"


@pytest.mark.parametrize("sizes", ["4096", "64,32,128"])
def test_sizes_that_are_none_are_refused(sizes: str) -> None:
    app = typer.Typer()
    app.command()(bench.main)
    result = CliRunner().invoke(app, ["--sizes", sizes])
    assert result.exit_code == 2
    assert "three sizes" in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    app = typer.Typer()
    app.command()(bench.main)
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2
    assert "no NVIDIA GPU" in result.output
