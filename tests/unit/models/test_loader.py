"""What loads, as what, and what is refused with which words."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_config
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GenerationConfig, PretrainedConfig

from models import loader, patching
from models.descriptions import load_tokenizer
from models.errors import ModelLoadError
from models.loader import load, load_for_training
from models.registry import ModelSource


def _save(folder: Path, config: PretrainedConfig | None = None, **model_arguments: Any) -> ModelSource:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config or tiny_config(), **model_arguments).save_pretrained(folder)
    return ModelSource(name="tiny", folder=folder)


def _edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_folder_loads_in_eval_mode_with_our_attention_and_no_gradients(tmp_path: Path) -> None:
    loaded = load(_save(tmp_path))
    assert loaded.model.config._attn_implementation == patching.LONGWAVE_PAGED
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert (loaded.vocab_size, loaded.max_position_embeddings, loaded.name) == (120, 512, "tiny")


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fast", [True, False])
def test_auto_is_bfloat16_on_a_cpu_that_multiplies_it_if_it_is_stored_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype, fast: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: fast)
    source = _save(tmp_path, dtype=stored)
    assert load(source).dtype == (torch.bfloat16 if fast and stored == torch.bfloat16 else torch.float32)
    assert load_for_training(source, dtype="auto").dtype == torch.float32


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_a_named_dtype_is_obeyed(tmp_path: Path, stored: torch.dtype) -> None:
    source = _save(tmp_path, dtype=stored)
    assert load(source, dtype="float32").dtype == torch.float32
    assert load(source, dtype="bfloat16").dtype == torch.bfloat16


def test_every_end_token_of_the_generation_config_counts(tmp_path: Path) -> None:
    source = _save(tmp_path)
    assert load(source).eos_token_ids == (2,)
    GenerationConfig(eos_token_id=[5, 6]).save_pretrained(tmp_path)
    assert load(source).eos_token_ids == (5, 6)


def test_a_folder_with_pickled_weights_only_is_refused(tmp_path: Path) -> None:
    source = _save(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"only pytorch_model\.bin: weights are read from \*\.safetensors alone"):
        load(source)


def test_a_model_that_brings_its_own_code_is_refused_and_its_code_not_run(tmp_path: Path) -> None:
    source = _save(tmp_path)
    (tmp_path / "modeling_evil.py").write_text("raise SystemExit('ran')")
    _edit_config(tmp_path, model_type="evil", auto_map={"AutoConfig": "modeling_evil.EvilConfig"})
    with pytest.raises(ModelLoadError, match=r"'evil' is not one that transformers knows .* never run"):
        load(source)


def test_a_known_family_loads_with_transformers_own_code_even_if_the_folder_has_code(tmp_path: Path) -> None:
    source = _save(tmp_path)
    (tmp_path / "modeling_evil.py").write_text("raise SystemExit('ran')")
    _edit_config(tmp_path, auto_map={"AutoModelForCausalLM": "modeling_evil.EvilForCausalLM"})
    assert type(load(source).model).__name__ == "LlamaForCausalLM"


def test_missing_weights_are_refused_rather_than_drawn_at_random(tmp_path: Path) -> None:
    source = _save(tmp_path)
    _edit_config(tmp_path, num_hidden_layers=4)
    with pytest.raises(ModelLoadError, match=r"lacks weights of LlamaForCausalLM: model\.layers\.3"):
        load(source)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
def test_a_model_without_memory_is_made_without_a_gpu(
    tmp_path: Path, stored: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_gpu(*_arguments: Any) -> Any:
        raise AssertionError("CUDA was asked")

    monkeypatch.setattr(torch.cuda, "get_device_capability", no_gpu)
    tiny_config(dtype=stored).save_pretrained(tmp_path)
    loaded = load(ModelSource(name="dummy", folder=tmp_path), device="meta", load_format="dummy")
    assert loaded.device.type == "meta"
    assert loaded.dtype == (torch.bfloat16 if stored == torch.float32 else stored)


def test_a_model_that_is_no_language_model_is_refused(tmp_path: Path) -> None:
    source = _save(tmp_path)
    _edit_config(tmp_path, model_type="vit")
    with pytest.raises(ModelLoadError, match="transformers cannot load"):
        load(source)


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="tiny has no tokenizer"):
        load_tokenizer(_save(tmp_path))


@pytest.mark.parametrize(
    "config",
    [
        tiny_config(
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        ),
        Gemma3TextConfig(
            vocab_size=120,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=512,
            layer_types=["sliding_attention", "full_attention"],
        ),
    ],
    ids=["llama3 rope", "gemma3"],
)
def test_a_config_alone_gives_random_weights_with_the_right_buffers(
    tmp_path: Path, config: PretrainedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "pack_linears", lambda _model: 0)  # plain layers: their weights can be compared
    config.save_pretrained(tmp_path)
    source = ModelSource(name="dummy", folder=tmp_path)
    made = load(source, load_format="dummy", dtype="float32").model
    normal = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    buffers = dict(made.named_buffers())
    assert buffers.keys() == dict(normal.named_buffers()).keys()
    for name, buffer in normal.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    ids = torch.arange(20)[None]
    normal.load_state_dict(made.state_dict())
    made.set_attn_implementation("eager")
    normal.set_attn_implementation("eager")
    with torch.no_grad():
        assert torch.equal(made(ids).logits, normal.eval()(ids).logits)
    assert all(bool(parameter.isfinite().all()) for parameter in made.parameters())


def test_random_weights_are_the_same_every_time_and_leave_the_random_state_alone(tmp_path: Path) -> None:
    tiny_config().save_pretrained(tmp_path)
    source = ModelSource(name="dummy", folder=tmp_path)
    before = torch.get_rng_state()
    first, second = (load(source, load_format="dummy").model.state_dict() for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[name], second[name]) for name in first)
