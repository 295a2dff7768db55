"""The training benchmark, on a shape that a CPU runs: contenders agree, and the longest length follows from two."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import model_folder, training, training_longest
from benchmarks.model_folder import TINY
from benchmarks.training import load
from benchmarks.training_longest import GRANULE, longest, predict
from benchmarks.training_steps import Results, Step, contenders, one_step, random_example, step_times
from models import registry
from models.training import LoraSettings, OutOfMemoryError, TrainingPlan
from models.training.optimizer import Optimizer
from models.training.trainable import TrainableModel


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TrainableModel:
    folder = model_folder.write(tmp_path_factory.mktemp("llama"), **TINY)
    return load(folder, 64, rank=4, device=torch.device("cpu"))


def test_contenders_take_the_same_step(model: TrainableModel) -> None:
    """The adapter after two steps: one to move B away from 0, one that learns through all of it."""
    example = random_example(64, TINY["vocab_size"])
    optimizer = Optimizer(model.parameters, weight_decay=0.0, max_grad_norm=1.0)
    start = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    ends = []
    for racer in contenders(model).values():
        optimizer.load_state_tensors(start)
        losses = [one_step(model, racer, example, optimizer).loss for _ in range(2)]
        assert losses[1] < losses[0]
        ends.append({name: t.clone() for name, t in optimizer.state_tensors().items() if name.startswith("exp_avg/")})
    optimizer.load_state_tensors(start)
    assert len(ends) == 4
    for end in ends[1:]:
        for name, tensor in ends[0].items():
            torch.testing.assert_close(end[name], tensor, atol=2e-5, rtol=1e-3)


def unheard(_text: str, _results: Results) -> None:
    pass


def test_a_contender_that_fails_is_named_and_the_others_go_on(model: TrainableModel) -> None:
    from torch.nn.attention import SDPBackend

    racers = contenders(model)
    racers["torch"] = type(racers["torch"])(racers["torch"].loss, "sdpa", SDPBackend.CUDNN_ATTENTION)
    results = step_times(model, racers, 32, 2, 60.0, unheard)
    assert "RuntimeError" in results["torch"]["failed"]
    assert results["longwave"]["tokens_per_s"] > 0
    assert len(results["longwave"]["step_s"]) == 2


def test_every_step_is_told_with_what_is_known_by_then_and_time_ends_the_rounds(model: TrainableModel) -> None:
    told = []
    racers = {name: racer for name, racer in contenders(model).items() if "torch" not in name}

    def hear(text: str, results: Results) -> None:
        told.append((text.partition(":")[0], {name: len(row.get("step_s", ())) for name, row in results.items()}))

    step_times(model, racers, 32, 5, 0.0, hear)
    ours, again = racers
    assert told == [(ours, {ours: 0}), (again, {ours: 0, again: 0}), (ours, {ours: 1, again: 0}),
                    (again, {ours: 1, again: 1})]  # fmt: skip


def test_contenders_that_compute_something_else_are_no_contenders(model: TrainableModel) -> None:
    racers = contenders(model)
    half = type(racers["torch"])(lambda *given: racers["torch"].loss(*given) / 2, "sdpa")
    with pytest.raises(SystemExit, match="do not compute the same loss"):
        step_times(model, {"longwave": racers["longwave"], "half": half}, 32, 1, 60.0, unheard)


def test_memory_that_ends_is_told_and_the_next_contender_runs(model: TrainableModel) -> None:
    racers = contenders(model)

    def too_much(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    greedy = type(racers["torch"])(too_much, "sdpa")
    results = step_times(model, {"greedy": greedy, "torch": racers["torch"]}, 32, 1, 60.0, unheard)
    assert results["greedy"] == {"failed": "OutOfMemoryError: 32 tokens do not fit"}
    assert results["torch"]["tokens_per_s"] > 0


def test_the_longest_length_is_where_the_line_through_two_peaks_meets_the_memory() -> None:
    assert (
        predict((100, 1_000_000 + 100 * 50), (200, 1_000_000 + 200 * 50), 1_000_000 + 50 * 10 * GRANULE) == 10 * GRANULE
    )
    assert predict((100, 10_000), (200, 20_000), 100 * (3 * GRANULE + 5)) == 3 * GRANULE
    assert predict((100, 10_000), (200, 20_000), 0) == GRANULE
    assert predict((100, 5), (200, 5), 10) == 200


def test_every_length_that_is_tried_is_told(model: TrainableModel) -> None:
    told = []
    racers = {"longwave": contenders(model)["longwave"]}

    def hear(text: str, results: Results) -> None:
        told.append({**results["longwave"]})

    found = longest(model, racers, 64, hear)["longwave"]
    assert [[tokens for tokens, _ in row["peak_bytes"]] for row in told] == [[32], [32, 64], [32, 64]]
    assert told[-1] == found
    assert found["predicted_tokens"] >= 64


def test_contenders_in_bfloat16_follow_each_other(tmp_path: Path) -> None:
    """Their gradients are moved to float32 as they arrive, by one optimizer."""
    folder = model_folder.write(tmp_path, **TINY)
    plan = TrainingPlan(
        model=str(folder), lora=LoraSettings(rank=4, alpha=8), max_length=64, micro_batch_tokens=64, dtype="bfloat16"
    )
    model = TrainableModel(plan, registry.resolve(plan.model), torch.device("cpu"), "dummy")
    found = longest(model, contenders(model), 64, lambda *_: None)
    assert [result["predicted_tokens"] >= 64 for result in found.values()] == [True] * 4


def test_a_length_that_does_not_fit_is_told_and_shorter_ones_are_tried(
    model: TrainableModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, whose memory ends above 7 times the granule; predicted were 9."""

    def step(_model: Any, _racer: Any, example: Any, _optimizer: Any) -> Step:
        if len(example) > 7 * GRANULE:
            raise OutOfMemoryError("too many")
        return Step(1.0, 0.0, 10 * len(example))

    monkeypatch.setattr(training_longest, "one_step", step)
    monkeypatch.setattr(training_longest, "Optimizer", lambda *_, **__: None)
    monkeypatch.setattr(training_longest, "room_for_training", lambda _device: 10 * 10 * GRANULE)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    gpu: Any = SimpleNamespace(device=torch.device("cuda"), parameters={}, config=model.config)
    told = []
    found = longest(gpu, {"it": contenders(model)["torch"]}, GRANULE, lambda _, results: told.append({**results["it"]}))
    assert (found["it"]["predicted_tokens"], found["it"]["longest_tokens"]) == (9 * GRANULE, 7 * GRANULE)
    assert found["it"]["too_long_tokens"] == [9 * GRANULE, 8 * GRANULE]
    assert told[-1] == found["it"]
    assert len(told) == 6


def run_script(*flags: str) -> Any:
    app = typer.Typer()
    app.command()(training.main)
    return CliRunner().invoke(app, ["--tiny", "--layers", "1", *flags])


def test_the_script_writes_what_it_ran_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    out = tmp_path / "training.json"
    flags = ("--rounds", "1", "--tokens", "32", "--commit", "abc", "--only", "longwave")
    done = run_script(*flags, "--out", str(out))
    assert done.exit_code == 0, done.output
    result = json.loads(out.read_text())
    assert result == json.loads(done.stdout)
    assert result["machine"]["commit"] == "abc"
    assert set(result["contenders"]) == {"longwave"}
    assert (result["tokens"], result["lora_rank"], result["rounds"]) == (32, 16, 1)
    assert result["model"]["num_hidden_layers"] == 1
    said = [line.partition(" s  ")[2] for line in done.stderr.splitlines()]
    assert said[0] == "1 layers of random weights on cpu"
    assert said[-1].startswith("longwave: round 1, ")


def test_a_contender_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    done = run_script("--only", "torch", "--only", "jax")
    assert done.exit_code == 2
    assert "['jax']" in done.stderr
