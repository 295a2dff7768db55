"""Packed losses and gradients are those of one example after the other, computed by transformers' eager attention."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from training_runs import random_examples, random_preferences, tiny_plan
from transformers import PreTrainedModel

from attention_backend import dispatch
from attention_backend.problem import AttentionArgs
from models import registry
from models.attention_sites import attention_implementation
from models.training import Example, Preference
from models.training.objectives import dpo, reference_logprobs, supervised
from models.training.packing import build, pack
from models.training.trainable import TrainableModel

CPU = torch.device("cpu")


def trainable(folder: Path, **changes: object) -> TrainableModel:
    plan = tiny_plan(folder, **changes)
    model = TrainableModel(plan, registry.resolve(plan.model), CPU)
    with torch.no_grad():  # B starts at 0, where A has no gradient
        for name, parameter in model.parameters.items():
            if "lora_B" in name:
                parameter.normal_(0, 0.2, generator=torch.Generator().manual_seed(2))
    return model


def gradients(model: TrainableModel) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.parameters.items() if p.grad is not None}
    for p in model.parameters.values():
        p.grad = None
    return found


def alone(model: PreTrainedModel, example: Example) -> Tensor:
    """Log-probabilities of the learnt tokens of one example, the textbook way."""
    ids = torch.tensor([example.tokens])
    logprobs = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
    wanted = torch.tensor(example.targets[1:])
    return logprobs[:-1].gather(1, ids[0, 1:, None])[wanted, 0]


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(actual[name], gradient, atol=2e-5 * float(gradient.abs().max()), rtol=1e-4)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_packed_supervised_equals_one_by_one(tiny_folder: Path, lora: bool, checkpointing: bool) -> None:
    model = trainable(tiny_folder, gradient_checkpointing=checkpointing, **({} if lora else {"lora": None}))
    examples = random_examples(7)
    expected = torch.zeros(())
    with attention_implementation(model.base, "eager"):
        for example in examples:
            loss = -alone(model.base, example).sum()
            loss.backward()
            expected = expected + loss.detach()
    wanted = gradients(model)

    batches = pack(examples, range(7), 64)
    actual = torch.zeros(())
    for indices in batches:
        sums = supervised(model, build(examples, indices, CPU))
        sums.loss.backward()
        actual = actual + sums.loss.detach()

    assert 1 < len(batches) < 7
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)
    assert_close(gradients(model), wanted)


def test_checkpointing_computes_attention_once_unless_asked_and_the_gradients_are_the_same_bits(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forwards, run = [0], dispatch.run

    def counted(args: AttentionArgs) -> tuple[Tensor, Tensor]:
        forwards[0] += 1
        return run(args)

    monkeypatch.setattr(dispatch, "run", counted)
    found, counts = [], []
    for options in ({"gradient_checkpointing": False}, {}, {"recompute_attention": True}):
        model = trainable(tiny_folder, **options)
        for module in model.base.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.3  # type: ignore[assignment]
        forwards[0] = 0
        torch.manual_seed(7)
        supervised(model, build(random_examples(3), (0, 1, 2), CPU)).loss.backward()
        found.append(gradients(model))
        counts.append(forwards[0])
    layers = 2
    assert counts == [layers, layers, 2 * layers]
    for name, gradient in found[0].items():
        assert torch.equal(found[1][name], gradient)
        assert torch.equal(found[2][name], gradient)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_packed_dpo_equals_the_formula_one_by_one(tiny_folder: Path, lora: bool) -> None:
    model = trainable(tiny_folder, method="dpo", **({} if lora else {"lora": None}))
    preferences, beta = random_preferences(4), 0.3
    # Fully tuned, the frozen model is not there any more: any numbers can stand for what was computed of it.
    frozen = torch.randn(4, 2, generator=torch.Generator().manual_seed(1)) * 5 - 30
    expected, ranked = torch.zeros(()), 0
    with attention_implementation(model.base, "eager"):
        for pair, kept in zip(preferences, frozen, strict=True):
            reference = kept
            if lora:
                with model.evaluating(adapter=False):
                    reference = torch.stack([alone(model.base, e).sum() for e in (pair.chosen, pair.rejected)])
            policy = torch.stack([alone(model.base, e).sum() for e in (pair.chosen, pair.rejected)])
            margin = (policy[0] - policy[1]) - (reference[0] - reference[1])
            loss = -functional.logsigmoid(beta * margin)
            loss.backward()
            expected, ranked = expected + loss.detach(), ranked + int(margin > 0)
    wanted = gradients(model)

    batch = build(preferences, (0, 1, 2, 3), CPU)
    sums = dpo(model, batch, reference_logprobs(model, batch) if lora else frozen, beta)
    sums.loss.backward()

    torch.testing.assert_close(sums.loss.detach(), expected, rtol=1e-4, atol=1e-5)
    assert sums.ranked is not None
    assert int(sums.ranked) == ranked
    assert sums.counted == sum(pair.chosen.learnt for pair in preferences)
    assert_close(gradients(model), wanted)


def test_the_reference_is_the_model_without_its_adapter_and_leaves_it_learning(tiny_folder: Path) -> None:
    model, untouched = trainable(tiny_folder, method="dpo"), trainable(tiny_folder, method="dpo", lora=None)
    batch = build(random_preferences(3), (0, 1, 2), CPU)
    torch.testing.assert_close(reference_logprobs(model, batch), reference_logprobs(untouched, batch))
    assert model.base.training
    assert all(parameter.requires_grad for parameter in model.parameters.values())
    assert not torch.allclose(model.logprobs(batch)[0], untouched.logprobs(batch)[0])


def test_a_document_does_not_see_the_one_before_it(tiny_folder: Path) -> None:
    """Bitwise: other tokens of the same length before a document change nothing in it."""
    model = trainable(tiny_folder)
    first, other, second = random_examples(3, seed=4, longest=9)
    other = Example((*other.tokens, *first.tokens)[: len(first)], first.targets)
    results = []
    for before in (first, other):
        batch = build([before, second], (0, 1), CPU)
        with model.evaluating():
            results.append(model.logprobs(batch)[0][batch.learnt[0] :])
    assert torch.equal(*results)


def test_preferences_and_examples_pack_alike() -> None:
    pair = random_preferences(1)[0]
    assert isinstance(pair, Preference)
    whole = build([pair], (0,), CPU)
    parts = build([pair.chosen, pair.rejected], (0, 1), CPU)
    assert torch.equal(whole.input_ids, parts.input_ids)
    assert torch.equal(whole.rows, parts.rows)
