"""Training on an NVIDIA GPU: the CPU's numbers in bfloat16, and with `deterministic` the same bits after a pause."""

from pathlib import Path
from typing import Any

import pytest
from training_runs import Reports, random_examples, random_preferences, tiny_plan, write_model

from models.training import LoraSettings, Outcome, Pacer, Trainer, TrainingPlan, Verdict

pytestmark = pytest.mark.gpu

EXAMPLES: dict[str, Any] = {"supervised": random_examples(10), "dpo": random_preferences(10)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Head dimension 64: what the kernels for bfloat16 take."""
    return write_model(tmp_path_factory.mktemp("gpu"), hidden_size=256, intermediate_size=512)


@pytest.fixture(autouse=True)
def repeatable_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def run(plan: TrainingPlan, folder: Path, device: str, reports: Reports) -> Outcome:
    return Trainer(plan, EXAMPLES[plan.method], None, folder, device).run(reports)


def result(outcome: Outcome) -> bytes:
    assert outcome.result is not None
    return next(outcome.result.glob("*.safetensors")).read_bytes()


@pytest.mark.parametrize("method", ["supervised", "dpo"])
@pytest.mark.parametrize("lora", [LoraSettings(4, 8), None], ids=["lora", "full"])
def test_losses_follow_the_cpu_s(folder: Path, tmp_path: Path, method: Any, lora: LoraSettings | None) -> None:
    losses = []
    for device in ("cpu", "cuda"):
        reports = Reports()
        plan = tiny_plan(folder, method=method, lora=lora, dtype="bfloat16", learning_rate=1e-3)
        run(plan, tmp_path / device, device, reports)
        losses.append([report.train_loss for report in reports])
    assert losses[1] == pytest.approx(losses[0], rel=0.05, abs=0.02)


@pytest.mark.parametrize(
    "changes",
    [
        {"lora": LoraSettings(4, 8, dropout=0.2)},
        {"lora": LoraSettings(4, 8), "recompute_attention": True},
        {"lora": None, "learning_rate": 1e-3},
        {"method": "dpo"},
    ],
    ids=["dropout", "attention recomputed", "full", "dpo"],
)
def test_deterministic_runs_end_with_the_same_bits_paused_or_not(
    folder: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    plan = tiny_plan(folder, deterministic=True, **changes)
    expected = result(run(plan, tmp_path / "whole", "cuda", Reports()))
    for step in (1, 4):
        assert not run(plan, tmp_path / "paused", "cuda", Reports(Verdict.PAUSE, after=step)).finished
    assert result(run(plan, tmp_path / "paused", "cuda", Reports())) == expected


@pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointing", "no checkpointing"])
def test_a_run_that_rests_between_layers_ends_with_the_same_bits(
    folder: Path, tmp_path: Path, checkpointing: bool
) -> None:
    plan = tiny_plan(folder, deterministic=True, gradient_checkpointing=checkpointing)
    expected = result(run(plan, tmp_path / "never", "cuda", Reports()))
    rests: list[float] = []
    pacer = Pacer(lambda: not rests.append(0.0), 0.5)
    outcome = Trainer(plan, EXAMPLES["supervised"], None, tmp_path / "rests", "cuda", pacer=pacer).run(Reports())
    assert len(rests) > 2 * 2 * len(EXAMPLES["supervised"])
    assert result(outcome) == expected


def test_keeping_attention_s_output_changes_no_bit(folder: Path, tmp_path: Path) -> None:
    results = [
        result(run(tiny_plan(folder, deterministic=True, **options), tmp_path / name, "cuda", Reports()))
        for name, options in (
            ("kept", {}),
            ("recomputed", {"recompute_attention": True}),
            ("all kept", {"gradient_checkpointing": False}),
        )
    ]
    assert results[1] == results[0]
    assert results[2] == results[0]
