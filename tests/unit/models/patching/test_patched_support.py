"""Families that would be wrong are refused at load, by name and with the reason."""

from pathlib import Path

import pytest
import torch
from patching_families import BY_NAME, CAUSAL, ENCODERS, SEQ2SEQ, Family
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BloomConfig,
    CodeGenConfig,
    DebertaV2Config,
    DiffLlamaConfig,
    FalconConfig,
    Gemma3Config,
    Gemma3TextConfig,
    GPTJConfig,
    Lfm2Config,
    LlamaConfig,
    MptConfig,
    NemotronConfig,
    PreTrainedConfig,
    SiglipVisionConfig,
    StableLmConfig,
    XGLMConfig,
)

from models.patching import (
    LONGWAVE,
    UnsupportedCallError,
    UnsupportedModelError,
    check_supported,
    check_supported_for_serving,
)
from models.patching.own_attention import is_bypassed_by

_SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_LLAMA = {**_SIZES, "intermediate_size": 32, "num_key_value_heads": 2}

BYPASSING = {
    "bloom": BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2),
    "falcon": FalconConfig(**_SIZES),
    "gptj": GPTJConfig(vocab_size=64, n_embd=32, n_layer=1, n_head=2, rotary_dim=8),
    "codegen": CodeGenConfig(vocab_size=64, n_embd=32, n_layer=1, n_head=4, rotary_dim=8),
    "mpt": MptConfig(vocab_size=64, d_model=32, n_layers=1, n_heads=2),
    "xglm": XGLMConfig(vocab_size=64, d_model=32, ffn_dim=32, num_layers=1, attention_heads=2),
}
NOT_SERVED = {
    "nemotron": (NemotronConfig(**_LLAMA, head_dim=16), "drops the keyword arguments"),
    "stablelm": (StableLmConfig(**_LLAMA), "drops the keyword arguments"),
    "diffllama": (DiffLlamaConfig(**_LLAMA), "attends twice"),
    "lfm2": (Lfm2Config(**_LLAMA, layer_types=["conv", "full_attention"]), "convolutions carry state"),
}


@pytest.mark.parametrize("family", [*CAUSAL, *ENCODERS, *SEQ2SEQ], ids=lambda family: family.name)
def test_promised_families_are_accepted(family: Family) -> None:
    check_supported(family.build())


@pytest.mark.parametrize("name", BYPASSING)
def test_families_with_attention_code_of_their_own_are_refused(name: str) -> None:
    model = AutoModelForCausalLM.from_config(BYPASSING[name])
    with pytest.raises(UnsupportedModelError, match=f"^{name}: .*attention code of its own"):
        check_supported(model)


@pytest.mark.parametrize("name", ["bloom", "codegen", "mpt", "xglm"])
def test_a_refused_family_that_loads_all_the_same_is_refused_by_its_first_mask(name: str, tmp_path: Path) -> None:
    """It would add the descriptor to its scores: at 8 keys, which is as wide, without an error."""
    AutoModelForCausalLM.from_config(BYPASSING[name]).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=LONGWAVE)
    refused = f"^{name} has attention code of its own"
    with torch.no_grad():
        with pytest.raises(UnsupportedCallError, match=refused):
            model(torch.arange(3, 11)[None])
        torch._dynamo.reset()
        with pytest.raises(UnsupportedCallError, match=refused):
            torch.compile(model, backend="eager")(torch.arange(3, 11)[None])


def test_masks_ask_for_the_classes_of_a_configuration() -> None:
    """Sub-configurations are asked for by their own layers; one whose model is not loaded, or none at all, passes."""
    for family in (*CAUSAL, *ENCODERS, *SEQ2SEQ):
        family.build()
        assert not is_bypassed_by(type(family.config()))
    assert not is_bypassed_by(type("Config", (PreTrainedConfig,), {}))
    assert not is_bypassed_by(type(None))


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # DeBERTa's own, in transformers 5.17
def test_an_encoder_that_takes_the_name_and_ignores_it_is_refused() -> None:
    config = DebertaV2Config(**_SIZES, intermediate_size=32)
    model = AutoModelForSequenceClassification.from_config(config)
    with pytest.raises(UnsupportedModelError, match="deberta-v2"):
        check_supported(model)


@pytest.mark.parametrize("name", NOT_SERVED)
def test_families_that_pages_cannot_hold_are_refused_for_serving_only(name: str) -> None:
    config, reason = NOT_SERVED[name]
    model = AutoModelForCausalLM.from_config(config)
    check_supported(model)
    with pytest.raises(UnsupportedModelError, match=f"^{name}: .*{reason}"):
        check_supported_for_serving(model)


@pytest.mark.parametrize(("name", "reason"), [("bart", "encoder-decoder"), ("bert", "does not generate")])
def test_only_decoders_are_served(name: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        check_supported_for_serving(BY_NAME[name].build())


def test_a_model_with_a_tower_is_refused_by_name() -> None:
    vision = SiglipVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = Gemma3Config(text_config=Gemma3TextConfig(**_LLAMA, head_dim=16), vision_config=vision)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    check_supported(model)
    with pytest.raises(UnsupportedModelError, match=r"^gemma3: it has a tower for vision: only text models are served"):
        check_supported_for_serving(model)


def served_llama(**options: object) -> PreTrainedConfig:
    return LlamaConfig(**_LLAMA, **options)


def test_dynamic_rope_is_refused_because_requests_would_change_each_other() -> None:
    config = served_llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(UnsupportedModelError, match="longest request of the batch"):
        check_supported_for_serving(AutoModelForCausalLM.from_config(config))
