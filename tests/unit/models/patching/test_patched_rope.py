"""LongRoPE chooses its frequencies once per engine, not from the longest request of a batch."""

from typing import Any

import pytest
import torch
from patching_families import tokens
from transformers import AutoModelForCausalLM, Phi3Config, PhimoeConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from models.patching import UnsupportedModelError, fix_longrope

ORIGINAL = 16
_SIZES = {
    "vocab_size": 120, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "pad_token_id": 0, "max_position_embeddings": 64,
}  # fmt: skip
SHORT_SCALE, LONG_SCALE = 1.1, 1.7  # of PhiMoE


def rope(**more: float) -> dict[str, Any]:
    return {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
        "original_max_position_embeddings": ORIGINAL, **more,
    }  # fmt: skip


def long_model(name: str = "phi3") -> PreTrainedModel:
    torch.manual_seed(0)
    config: PreTrainedConfig
    if name == "phi3":
        config = Phi3Config(**_SIZES, original_max_position_embeddings=ORIGINAL, rope_parameters=rope())
    else:
        scales = {"short_mscale": SHORT_SCALE, "long_mscale": LONG_SCALE}
        config = PhimoeConfig(**_SIZES, num_local_experts=2, rope_parameters=rope(**scales))
    return AutoModelForCausalLM.from_config(config).eval()


def logits(model: PreTrainedModel, length: int) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens(1, length)).logits


@pytest.mark.parametrize(("max_model_len", "like_length"), [(ORIGINAL, 8), (64, 32)])
def test_a_pinned_model_computes_a_given_length_as_transformers_does(max_model_len: int, like_length: int) -> None:
    expected = logits(long_model(), like_length)
    model = long_model()
    assert fix_longrope(model, max_model_len) == 1
    torch.testing.assert_close(logits(model, like_length), expected)


@pytest.mark.parametrize("name", ["phi3", "phimoe"])
def test_a_long_request_does_not_change_a_short_one(name: str) -> None:
    model = long_model(name)
    fix_longrope(model, 64)
    alone = logits(model, 8)
    logits(model, 40)
    assert torch.equal(logits(model, 8), alone)


@pytest.mark.parametrize("name", ["phi3", "phimoe"])
def test_pinning_may_be_repeated_with_another_length(name: str) -> None:
    model = long_model(name)
    fix_longrope(model, 64)
    assert fix_longrope(model, ORIGINAL) == 1
    torch.testing.assert_close(logits(model, 8), logits(long_model(name), 8))


@pytest.mark.parametrize(("max_model_len", "factor", "scale"), [(ORIGINAL, 1.0, SHORT_SCALE), (64, 4.0, LONG_SCALE)])
@pytest.mark.parametrize("length", [8, 40])
def test_phimoe_s_frequencies_and_their_scale_are_pinned(
    max_model_len: int, factor: float, scale: float, length: int
) -> None:
    """As its authors compute them: transformers has the long scale go with the short factors."""
    model: Any = long_model("phimoe")
    before = dict(model.config.rope_parameters)
    assert fix_longrope(model, max_model_len) == 1
    positions = torch.arange(length)[None]
    cos, sin = model.model.rotary_emb(torch.zeros(1, length, 32), positions)
    frequencies = 1 / (factor * 10000.0 ** (torch.arange(0, 16, 2) / 16))
    angles = (positions[0, :, None] * frequencies).repeat(1, 2)
    torch.testing.assert_close(cos[0], angles.cos() * scale)
    torch.testing.assert_close(sin[0], angles.sin() * scale)
    assert model.config.rope_parameters == before  # what a tuned model is saved with


def test_an_embedding_that_goes_on_choosing_is_refused() -> None:
    model: Any = long_model()
    rotary = model.model.rotary_emb

    def chooses(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](rotary.config, x.device, seq_len=int(position_ids.max()) + 1)
        angles = position_ids[..., None] * frequencies
        return angles.cos(), angles.sin()

    rotary.forward = chooses
    with pytest.raises(UnsupportedModelError, match=r"^phi3: Phi3RotaryEmbedding computes its LongRoPE frequencies"):
        fix_longrope(model, 64)
