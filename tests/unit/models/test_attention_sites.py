"""What each layer lets a token see is known before it serves, and refused where pages would show it something else."""

from typing import Any

import pytest
import torch
from tiny_models import random_model, tiny_config
from transformers import (
    Gemma3TextConfig,
    HeliumConfig,
    Llama4TextConfig,
    MistralConfig,
    PhimoeConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
)

from models.attention_sites import find_attention_sites
from models.patching import UnsupportedModelError

_SIZES = {name: size for name, size in tiny_config().to_dict().items() if name in (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "pad_token_id",
    "bos_token_id", "eos_token_id",
)}  # fmt: skip
_MOE: dict[str, Any] = {**_SIZES, "num_hidden_layers": 2}
_LAYERS = ["sliding_attention", "full_attention"]
WINDOWS = {
    "mistral": (MistralConfig(**_MOE, sliding_window=8), [("sliding_attention", 8, 0)] * 2),
    "mistral without": (MistralConfig(**_MOE, sliding_window=None), [("full_attention", 0, 0)] * 2),
    "qwen2_moe": (
        Qwen2MoeConfig(**_MOE, num_experts=4, use_sliding_window=True, sliding_window=8, layer_types=_LAYERS),
        [("sliding_attention", 8, 0), ("full_attention", 0, 0)],
    ),
    "qwen2_moe without": (Qwen2MoeConfig(**_MOE, num_experts=4), [("full_attention", 0, 0)] * 2),
    "phimoe": (PhimoeConfig(**_MOE, num_local_experts=4, sliding_window=8), [("sliding_attention", 8, 0)] * 2),
    "llama4": (
        Llama4TextConfig(
            **_MOE, head_dim=16, intermediate_size_mlp=96, num_local_experts=2, attention_chunk_size=16,
            layer_types=["chunked_attention", "full_attention"],
        ),
        [("chunked_attention", 0, 16), ("full_attention", 0, 0)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_and_chunks_are_found_also_where_the_mask_alone_tells_them(name: str) -> None:
    config, expected = WINDOWS[name]
    sites = find_attention_sites(random_model(config))
    assert [(site.layer_type, site.window, site.chunk_size) for site in sites] == expected


@pytest.mark.parametrize("name", ["mistral", "llama4"])
def test_a_model_without_weights_has_the_same_sites(name: str) -> None:
    with torch.device("meta"):
        model = random_model(WINDOWS[name][0])
    assert find_attention_sites(model) == find_attention_sites(random_model(WINDOWS[name][0]))


def misleading_config() -> PretrainedConfig:
    """It names a window, and Llama's layers have none."""
    config = tiny_config()
    config.sliding_window = 8  # type: ignore[attr-defined]
    return config


MISLED = {
    "window of no mask": (misleading_config(), r"layer 0 \(sliding_attention\) is causal_mask_function, .* of 8 keys"),
    "no causality": (tiny_config(is_causal=False), r"layer 0 \(full_attention\) is bidirectional_mask_function"),
}


@pytest.mark.parametrize("name", MISLED)
def test_a_mask_that_pages_would_not_follow_is_refused(name: str) -> None:
    config, reason = MISLED[name]
    with pytest.raises(UnsupportedModelError, match=reason):
        find_attention_sites(random_model(config))


def test_a_window_that_is_missing_where_layers_have_one_is_refused_in_words() -> None:
    model = random_model(Gemma3TextConfig(**_SIZES, head_dim=16, num_hidden_layers=1, sliding_window=None))
    with pytest.raises(
        UnsupportedModelError, match=r"Gemma3ForCausalLM does not run as its config\.json .*sliding_win"
    ):
        find_attention_sites(model)


def test_sizes_that_do_not_go_together_are_refused_in_words() -> None:
    """Helium's last projection is as wide as the model, whatever its heads are."""
    model = random_model(HeliumConfig(**_SIZES, head_dim=32, num_hidden_layers=1))
    with pytest.raises(
        UnsupportedModelError, match=r"HeliumForCausalLM does not run as its config\.json .*RuntimeError: "
    ):
        find_attention_sites(model)
