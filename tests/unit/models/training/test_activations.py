"""Small batches are not computed twice, and nothing else of a run changes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from training_runs import Reports, random_examples, tiny_plan
from transformers.models.llama.modeling_llama import LlamaMLP

from models import registry
from models.training import Trainer
from models.training.activations import kept_bytes
from models.training.packing import build
from models.training.self_check import check_packed_path
from models.training.trainable import TrainableModel

KEPT_BYTES = "models.training.activations.KEPT_BYTES"
CPU = torch.device("cpu")


def test_what_is_kept_is_counted_once_and_weights_are_not() -> None:
    linear, inputs = nn.Linear(16, 32), torch.randn(8, 16)
    one = 8 * 32 * 4  # bytes of the linear layer's output

    def forward() -> Tensor:
        found = linear(inputs)
        return found.exp() + found.sin() + found[:4].cos().sum()  # exp keeps its output, sin and cos their input

    with torch.no_grad():  # as a self-test calls it
        assert kept_bytes(forward, linear.parameters()) == inputs.nbytes + 2 * one


def test_a_small_measurement_tells_what_larger_batches_keep(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KEPT_BYTES, 2**30)
    plan = tiny_plan(tiny_folder, max_length=200, micro_batch_tokens=512)
    model = TrainableModel(plan, registry.resolve(plan.model), CPU)
    check_packed_path(model)
    batch = build(random_examples(4, longest=120), (0, 1, 2, 3), CPU)
    assert model._checkpointing is not None
    expected = model._checkpointing._bytes_per_token
    actual = kept_bytes(lambda: model.hidden(batch), model._whole.parameters()) / batch.tokens
    assert expected == pytest.approx(actual, rel=0.1)


@pytest.mark.parametrize("most", ["all of them", "those that fit"])
def test_batches_that_fit_are_computed_once_and_the_bits_are_the_same(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: str
) -> None:
    forwards, forward = [0], LlamaMLP.forward

    def counted(mlp: LlamaMLP, x: Tensor) -> Tensor:
        forwards[0] += torch.is_grad_enabled()
        return forward(mlp, x)

    monkeypatch.setattr(LlamaMLP, "forward", counted)
    plan = tiny_plan(tiny_folder, batch_size=1, micro_batch_tokens=64)
    model = TrainableModel(plan, registry.resolve(plan.model), CPU)
    check_packed_path(model)
    assert model._checkpointing is not None
    assert model._checkpointing._bytes_per_token is not None
    limit = 2**30 if most == "all of them" else int(16 * model._checkpointing._bytes_per_token)
    counts, results = [], []
    examples = random_examples(6)
    assert min(map(len, examples)) <= 16 < max(map(len, examples))
    for kept in (0, limit):
        monkeypatch.setattr(KEPT_BYTES, kept)
        forwards[0] = 0
        outcome = Trainer(plan, examples, None, tmp_path / str(kept), "cpu").run(Reports())
        assert outcome.result is not None
        counts.append(forwards[0])
        results.append(load_file(outcome.result / "adapter_model.safetensors"))
    layers, measuring = 2, 2
    once = layers * plan.n_epochs * len(examples)
    long = 0 if most == "all of them" else sum(len(example) > 16 for example in examples)
    assert counts == [2 * once + measuring, once + layers * plan.n_epochs * long + measuring]
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(tensor, results[1][name]) for name, tensor in results[0].items())
