"""LongRoPE chooses its frequencies once per engine, not from the longest request of a batch."""

import pytest
import torch
from patching_families import tokens
from transformers import AutoModelForCausalLM, Phi3Config, PreTrainedModel

from models.patching import fix_longrope

ORIGINAL = 16


def phi3_long() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=120, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=0, max_position_embeddings=64, original_max_position_embeddings=ORIGINAL,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
            "original_max_position_embeddings": ORIGINAL,
        },
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def logits(model: PreTrainedModel, length: int) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens(1, length)).logits


@pytest.mark.parametrize(("max_model_len", "like_length"), [(ORIGINAL, 8), (64, 32)])
def test_a_pinned_model_computes_a_given_length_as_transformers_does(max_model_len: int, like_length: int) -> None:
    expected = logits(phi3_long(), like_length)
    model = phi3_long()
    assert fix_longrope(model, max_model_len) == 1
    torch.testing.assert_close(logits(model, like_length), expected)


def test_a_long_request_does_not_change_a_short_one() -> None:
    model = phi3_long()
    fix_longrope(model, 64)
    alone = logits(model, 8)
    logits(model, 40)
    assert torch.equal(logits(model, 8), alone)


def test_pinning_may_be_repeated_with_another_length() -> None:
    model = phi3_long()
    fix_longrope(model, 64)
    assert fix_longrope(model, ORIGINAL) == 1
    torch.testing.assert_close(logits(model, 8), logits(phi3_long(), 8))
