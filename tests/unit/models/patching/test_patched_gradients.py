"""Training through the patched attention: every parameter's gradient is eager attention's."""

import pytest
import torch
from patching_families import BY_NAME, padding, tokens

NAMES = ["llama", "gemma2", "gpt_oss", "deepseek_v3", "t5"]


def gradients(name: str, implementation: str, checkpointing: bool = False) -> dict[str, torch.Tensor]:
    model = BY_NAME[name].build(implementation).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0  # type: ignore[assignment]
    if checkpointing:
        # Renamed after transformers 5.17; the old name warns in newer ones.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
    ids, mask = tokens(2, 24), padding(2, 24, "right")
    model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_all_parameters_equal_eager(name: str) -> None:
    expected, actual = gradients(name, "eager"), gradients(name, "longwave")
    assert actual.keys() == expected.keys()
    for parameter, grad in expected.items():
        torch.testing.assert_close(actual[parameter], grad, atol=2e-5 * float(grad.abs().max()) + 1e-6, rtol=1e-3)


def test_checkpointing_drops_the_same_probabilities_twice() -> None:
    """Dropout draws its seed from torch's generator, which checkpointing puts back for the second forward."""

    def run(checkpointing: bool) -> dict[str, torch.Tensor]:
        model = BY_NAME["llama"].build("longwave").train()
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.3  # type: ignore[assignment]
        if checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable()
        ids = tokens(2, 24)
        torch.manual_seed(5)
        model(input_ids=ids, labels=ids).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    expected, actual, plain = run(False), run(True), gradients("llama", "longwave")
    for parameter, grad in expected.items():
        torch.testing.assert_close(actual[parameter], grad)
    assert any(not torch.allclose(grad, plain[name]) for name, grad in expected.items())


def test_gradients_with_checkpointing_equal_those_without() -> None:
    expected, actual = gradients("llama", "longwave"), gradients("llama", "longwave", checkpointing=True)
    for parameter, grad in expected.items():
        torch.testing.assert_close(actual[parameter], grad)
