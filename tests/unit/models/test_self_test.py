"""A model that would be silently wrong on the engine's path is refused before it serves."""

import copy
from typing import Any

import pytest
import torch
from tiny_models import TINY, random_model, tiny_config
from transformers import DeepseekV3Config, GPT2Config, LlamaConfig, MistralConfig, PretrainedConfig, Qwen3Config

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
    with pytest.raises(UnsupportedModelError, match=r"not finite: the weights are damaged, or float32 is too narrow"):
        check_engine_path(model, sites, block_size=16)


def test_a_model_that_fails_in_steps_without_samples_is_refused() -> None:
    model = random_model(tiny_config())
    sites = find_attention_sites(model)

    def lose_positions(_module: Any, inputs: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if "logits_to_keep" in keywords:
            keywords["position_ids"] = keywords["position_ids"] * 0
        return inputs, keywords

    model.register_forward_pre_hook(lose_positions, with_kwargs=True)
    with pytest.raises(UnsupportedModelError, match="self-test"):
        check_engine_path(model, sites, block_size=16)


def test_a_model_that_drops_the_pages_is_refused() -> None:
    model = random_model(tiny_config())
    sites = find_attention_sites(model)

    def drop(_module: Any, inputs: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return inputs, {name: value for name, value in keywords.items() if name != "paged_metadata"}

    model.model.layers[1].self_attn.register_forward_pre_hook(drop, with_kwargs=True)
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM cannot be served: .*drops its keyword"):
        check_engine_path(model, sites, block_size=16)


def test_a_layer_that_keeps_its_own_attention_is_refused() -> None:
    model = random_model(tiny_config())
    model.model.layers[1].self_attn.config = copy.deepcopy(model.config)
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM cannot be served: LlamaAttention was called"):
        find_attention_sites(model)


@pytest.mark.parametrize("config", [LlamaConfig, MistralConfig, Qwen3Config])
def test_a_softcap_that_the_family_does_not_read_is_not_applied(config: type[PretrainedConfig]) -> None:
    model = random_model(config(**{**tiny_config().to_diff_dict(), "final_logit_softcapping": 3.0}))
    check_engine_path(model, find_attention_sites(model), block_size=16)


CANNOT_RUN = {
    "fewer key heads than MLA makes": (
        DeepseekV3Config(
            **TINY, kv_lora_rank=16, q_lora_rank=None, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
            first_k_dense_replace=3,
        ),
        "RuntimeError: The size of tensor",
    ),
    "fewer positions than the prompts": (
        GPT2Config(vocab_size=120, n_positions=32, n_embd=64, n_layer=1, n_head=4), "IndexError: "
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CANNOT_RUN)
def test_a_model_that_eager_attention_cannot_run_is_refused_in_words(name: str) -> None:
    config, reason = CANNOT_RUN[name]
    model = random_model(config)
    sites = find_attention_sites(model)
    with pytest.raises(UnsupportedModelError, match=rf"does not run as its config\.json has it: {reason}"):
        check_engine_path(model, sites, block_size=16)


def test_memory_that_is_not_there_is_no_fault_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(tiny_config())
    sites = find_attention_sites(model)

    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("all in use")

    monkeypatch.setattr(model, "forward", fail)
    with pytest.raises(torch.OutOfMemoryError):
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
