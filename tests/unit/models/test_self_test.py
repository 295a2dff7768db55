"""A model that would be silently wrong on the engine's path is refused before it serves."""

from typing import Any

import pytest
import torch
from tiny_models import random_model, tiny_config

from models import patching
from models.attention_sites import find_attention_sites
from models.patching import UnsupportedModelError
from models.self_test import check_engine_path


@pytest.mark.parametrize("block_size", [16, 64])
def test_a_right_model_passes_and_keeps_its_attention(block_size: int) -> None:
    model = random_model(tiny_config())
    check_engine_path(model, find_attention_sites(model), block_size=block_size)
    assert model.config._attn_implementation == patching.LONGWAVE_PAGED


def test_a_model_that_carries_state_between_packed_tokens_is_refused() -> None:
    model = random_model(tiny_config())

    def leak(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 0.5 * output.roll(1, dims=1)  # like a convolution over the flat row

    sites = find_attention_sites(model)
    model.model.layers[1].mlp.register_forward_hook(leak)
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM fails the self-test"):
        check_engine_path(model, sites, block_size=16)


def test_a_model_whose_output_is_not_finite_is_refused() -> None:
    model = random_model(tiny_config())
    sites = find_attention_sites(model)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    with pytest.raises(UnsupportedModelError, match="self-test"):
        check_engine_path(model, sites, block_size=16)


def test_layers_that_share_a_number_are_refused() -> None:
    model = random_model(tiny_config())
    model.model.layers[2] = model.model.layers[1]
    with pytest.raises(UnsupportedModelError, match=r"has 3 layers, but attention was called for layers \[0, 1, 1\]"):
        find_attention_sites(model)


def test_sites_know_what_each_layer_needs() -> None:
    sites = find_attention_sites(random_model(tiny_config()))
    assert [(site.layer_idx, site.num_heads, site.num_kv_heads, site.head_dim) for site in sites] == [
        (layer, 4, 2, 16) for layer in range(3)
    ]
    assert {(site.layer_type, site.window, site.chunk_size) for site in sites} == {("full_attention", 0, 0)}
