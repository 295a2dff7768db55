"""The benchmark of linear layers with few rows without a GPU: what it counts, what the chain computes, the table."""

import pytest
import torch
import torch.nn.functional as F
import typer
from typer.testing import CliRunner

from benchmarks import skinny_linear as bench
from benchmarks.skinny_linear import LAYER, TORCH, WEIGHTS, Row


def test_rates_count_the_weight_once() -> None:
    facts = Row("down", 4, {TORCH: 40.0}, {TORCH: 0.0}).facts()
    assert facts["tb_per_s"] == {TORCH: round(4096 * 14336 * 2 / 40e-6 / 1e12, 3)}


@pytest.mark.parametrize("gaps", [False, True])
def test_the_chain_goes_through_every_layer_and_the_head(monkeypatch: pytest.MonkeyPatch, gaps: bool) -> None:
    small = {name: (n // 256, k // 256) for name, (n, k) in WEIGHTS.items()}
    monkeypatch.setattr(bench, "WEIGHTS", small)
    seen: list[torch.Size] = []

    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append(weight.shape)
        return F.linear(x, weight)

    layers = [{name: torch.ones(small[name]) for name in LAYER} for _ in range(3)]
    out = bench._step(linear, torch.ones(2, 16), layers, torch.ones(small["lm_head"]), gaps)
    assert out.shape == (2, small["lm_head"][0])
    assert seen == 3 * [small[name] for name in LAYER] + [small["lm_head"]]


def test_the_table_names_the_best_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Row("o", 1, {TORCH: 10.0, "table": 8.0, "late": 9.0}, {})]
    chain = {"m": 1, "layers": 32, "gaps": False, "bytes": 15e9, "ms": {TORCH: 4.0, "table": 3.5}}
    bench.show(rows, [chain])
    shown = capsys.readouterr().out
    assert "table 4.19 1.25" in shown
    assert "32 layers and head, m = 1: torch 4.000, table 3.500 ms (table: 4.29 TB/s)" in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    app = typer.Typer()
    app.command()(bench.main)
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2
    assert "no NVIDIA GPU" in result.output
