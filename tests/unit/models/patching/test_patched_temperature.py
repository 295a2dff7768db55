"""Llama 4's queries are scaled by their position in their own sequence, wherever in a row they stand."""

from typing import Any

import pytest
import torch
from patching_families import BY_NAME, tokens
from torch import Tensor

from models.patching import UnsupportedCallError, fix_temperature

LENGTHS = [9, 21, 14]  # the temperature changes after every seventh token


def llama4(implementation: str = "longwave") -> Any:
    return BY_NAME["llama4"].build(implementation)


def packed() -> dict[str, Any]:
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    return {
        "input_ids": torch.cat([tokens(1, length, seed=length) for length in LENGTHS], 1),
        "position_ids": torch.cat([torch.arange(length) for length in LENGTHS])[None],
        "cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS),
        "use_cache": False,
    }  # fmt: skip


def gradients(model: Any, logits: Tensor) -> dict[str, Tensor]:
    logits.square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_without_it_transformers_counts_through_the_row() -> None:
    """Why this is here: where this fails, transformers has learnt to read position_ids itself."""
    model = llama4()
    row = packed()
    with torch.no_grad():
        counted = model(**row).logits
        assert fix_temperature(model) == 1
        told = model(**row).logits
    assert torch.equal(told[:, : LENGTHS[0]], counted[:, : LENGTHS[0]])
    assert not torch.allclose(told[:, LENGTHS[0] :], counted[:, LENGTHS[0] :], rtol=1e-2)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_sequences_learn_what_each_learns_alone(checkpointing: bool) -> None:
    """A layer that is checkpointed is computed again, and has no cache."""
    alone, model = llama4("eager").train(), llama4().train()
    pieces = [alone(tokens(1, length, seed=length), use_cache=False).logits for length in LENGTHS]
    expected = gradients(alone, torch.cat(pieces, 1))
    fix_temperature(model)
    if checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
    actual = gradients(model, model(**packed()).logits)
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(actual[name], grad, atol=2e-5 * float(grad.abs().max()) + 1e-6, rtol=1e-3)


def test_it_may_be_repeated_and_leaves_generate_alone() -> None:
    """With a cache, transformers counts from what the cache has seen."""
    model = llama4()
    ids = tokens(1, 20)
    expected = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=-1)
    assert fix_temperature(model) == fix_temperature(model) == 1
    assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=-1), expected)


def test_rows_of_positions_of_their_own_are_refused() -> None:
    model = llama4()
    fix_temperature(model)
    positions = torch.stack([torch.arange(8), torch.arange(4, 12)])
    with pytest.raises(UnsupportedCallError, match="one flat row"):
        model(tokens(2, 8), position_ids=positions, use_cache=False)


def test_other_families_have_nothing_to_fix() -> None:
    assert fix_temperature(BY_NAME["llama"].build()) == 0
