"""The training benchmark, on a shape that a CPU runs: contenders agree, and the longest length follows from two."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import model_folder
from benchmarks.training import TINY, compare, load
from benchmarks.training_longest import GRANULE, predict
from benchmarks.training_steps import contenders, one_step, random_example
from models.training.optimizer import Optimizer
from models.training.trainable import TrainableModel

ROOT = Path(__file__).parents[3]


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


def test_a_contender_that_fails_is_named_and_the_others_go_on(model: TrainableModel) -> None:
    from torch.nn.attention import SDPBackend

    racers = contenders(model)
    racers["torch"] = type(racers["torch"])(racers["torch"].loss, "sdpa", SDPBackend.CUDNN_ATTENTION)
    results = compare(model, racers, tokens=32, rounds=2)
    assert "RuntimeError" in results["torch"]["failed"]
    assert results["longwave"]["tokens_per_s"] > 0
    assert len(results["longwave"]["step_s"]) == 2


def test_the_longest_length_is_where_the_line_through_two_peaks_meets_the_memory() -> None:
    assert (
        predict((100, 1_000_000 + 100 * 50), (200, 1_000_000 + 200 * 50), 1_000_000 + 50 * 10 * GRANULE) == 10 * GRANULE
    )
    assert predict((100, 10_000), (200, 20_000), 100 * (3 * GRANULE + 5)) == 3 * GRANULE
    assert predict((100, 10_000), (200, 20_000), 0) == GRANULE
    assert predict((100, 5), (200, 5), 10) == 200


def test_the_script_writes_what_it_ran_on(tmp_path: Path) -> None:
    out = tmp_path / "training.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.training",
        "--tiny",
        "--rounds",
        "1",
        "--tokens",
        "32",
        "--commit",
        "abc",
    ]
    subprocess.run([*command, "--only", "longwave", "--out", str(out)], cwd=ROOT, check=True, capture_output=True)
    result = json.loads(out.read_text())
    assert result["machine"]["commit"] == "abc"
    assert set(result["contenders"]) == {"longwave", "longwave, attention recomputed"}
    assert (result["tokens"], result["lora_rank"], result["rounds"]) == (32, 16, 1)
