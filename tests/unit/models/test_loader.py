"""What loads, as what, and what is refused with which words."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_config
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CpmAntConfig,
    FalconConfig,
    Gemma3TextConfig,
    GenerationConfig,
    GPTJConfig,
    GPTNeoConfig,
    MptConfig,
    PretrainedConfig,
    RecurrentGemmaConfig,
    WhisperConfig,
)

from models import loader, patching
from models.attention_sites import find_attention_sites
from models.descriptions import load_tokenizer, read_config
from models.errors import ModelLoadError
from models.forward import PagedForward
from models.loader import load, load_for_training
from models.patching import UnsupportedModelError
from models.placing import place
from models.registry import ModelSource
from models.stored_weights import readable
from models.weight_reading import WeightReading


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
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": []}')
    assert load(source).eos_token_ids == (2,)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_model_together_with_an_adapter_is_refused(tmp_path: Path, load_format: Any) -> None:
    source = _save(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"a model and an adapter \(adapter_config\.json\).* --lora-modules"):
        load(source, load_format=load_format)


def test_what_generation_would_do_otherwise_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = _save(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"bad_words_ids": [[5]]}))
    load(source)
    assert "generation_config.json asks for bad_words_ids, which is not applied" in caplog.text


@pytest.mark.parametrize("field", [{"output_attentions": True}, {"output_hidden_states": True}, {"return_dict": False}])
def test_outputs_that_a_config_asks_for_keep_no_layer_from_being_fused(tmp_path: Path, field: dict[str, bool]) -> None:
    """A forward's hooks collected them; without return_dict there was none."""
    source = _save(tmp_path)
    _edit_config(tmp_path, **field)
    model = load(source).model
    find_attention_sites(model)
    assert PagedForward(model).fused.unfused == {}


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:20000])


def _repeat(file: Path) -> None:
    file.write_bytes(file.read_bytes() * 2)


def _describe(**changes: Any) -> Callable[[Path], Any]:
    """Changes what the header says of one tensor."""

    def damage(file: Path) -> None:
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        header["model.norm.weight"].update(changes)
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])

    return damage


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DAMAGED: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "cut": (WEIGHTS, _cut, r"model\.safetensors ends before \S+\.weight"),
    "empty": (WEIGHTS, lambda file: file.write_bytes(b""), r"model\.safetensors is no safetensors file"),
    "4 bytes": (WEIGHTS, lambda file: file.write_bytes(b"abcd"), r"model\.safetensors is no safetensors file"),
    "header too long": (WEIGHTS, lambda file: file.write_bytes(b"\xff" * 99), r"model\.safetensors is no safetensors"),
    "header no JSON": (WEIGHTS, lambda file: file.write_bytes(b"\2" + bytes(50)), r"model\.safetensors .* its header"),
    "header a list": (
        WEIGHTS,
        lambda file: file.write_bytes(b"\2" + bytes(7) + b"[]"),
        r"model\.safetensors .* header",
    ),
    "dtype a list": (WEIGHTS, _describe(dtype=["F32"]), r"model\.safetensors .* model\.norm\.weight cannot be read"),
    "shape of words": (WEIGHTS, _describe(shape=["x"]), r"model\.safetensors .* model\.norm\.weight cannot be read"),
    "shape below 0": (WEIGHTS, _describe(shape=[-64]), r"model\.safetensors .* model\.norm\.weight cannot be read"),
    "shape too large": (
        WEIGHTS,
        _describe(shape=[10**15]),
        r"model\.safetensors .* model\.norm\.weight cannot be read",
    ),
    "offsets of floats": (WEIGHTS, _describe(data_offsets=[0.0, 4.0]), r"model\.norm\.weight cannot be read"),
    "pointer": (WEIGHTS, lambda file: file.write_text("version https://git-lfs.github.com/spec/v1"), "git lfs pull"),
    "too long": (WEIGHTS, _repeat, r"model\.safetensors goes on after its last tensor"),
    "index no JSON": (INDEX, lambda file: file.write_text("{"), r"index\.json is no index"),
    "index without map": (INDEX, lambda file: file.write_text("{}"), r"index\.json is no index .*weight_map"),
    "index a list": (INDEX, lambda file: file.write_text("[]"), r"index\.json is no index"),
    "index of a list": (INDEX, lambda file: file.write_text('{"weight_map": []}'), r"index\.json is no index"),
    "shard cut": ("model-00002-of-00003.safetensors", _cut, r"model-00002-of-00003\.safetensors ends before model\."),
    "shard missing": ("model-00002-of-00003.safetensors", Path.unlink, r"No such file.*model-00002-of-00003"),
    "config no JSON": ("config.json", lambda file: file.write_text("{"), r"config\.json is no JSON"),
    "config a list": ("config.json", lambda file: file.write_text("[]"), r"config\.json holds no object"),
    "config not UTF-8": ("config.json", lambda file: file.write_bytes(b"\xff\xfe"), r"config\.json is no JSON"),
    "generation null": (
        "generation_config.json",
        lambda file: file.write_text("null"),
        r"generation_config\.json holds",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_refused_by_name(tmp_path: Path, name: str) -> None:
    file, damage, reason = DAMAGED[name]
    in_shards = "index" in name or "shard" in name
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config())
    model.save_pretrained(tmp_path, max_shard_size="200KB" if in_shards else "1GB")
    damage(tmp_path / file)
    for loads in (load, partial(load_for_training, dtype="auto")):
        with pytest.raises(ModelLoadError, match=reason):
            loads(ModelSource(name="tiny", folder=tmp_path))


@pytest.mark.parametrize("metadata", [{}, {"metadata": None}], ids=["without", "null"])
def test_an_index_that_transformers_cannot_read_is_named(tmp_path: Path, metadata: dict[str, Any]) -> None:
    """config.json was blamed."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_config()).save_pretrained(tmp_path, max_shard_size="200KB")
    source = ModelSource(name="tiny", folder=tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    alone = {"weight_map": index["weight_map"]}
    (tmp_path / INDEX).write_text(json.dumps(alone | metadata))
    for loads in (load, partial(load_for_training, dtype="auto")):
        with pytest.raises(ModelLoadError, match=r"safetensors\.index\.json has no object `metadata`, .* add"):
            loads(source)
    (tmp_path / INDEX).write_text(json.dumps({**alone, "metadata": {}}))
    load(source)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vocab_size": 240}, r"\S+\.weight is \[120, 64\] in the weights and \[240, 64\] by config\.json"),
        (
            {"num_key_value_heads": 1},
            r"layers\.0\.self_attn\.k_proj\.weight is \[32, 64\] in the weights and \[16, 64\]",
        ),
        ({"hidden_size": "64"}, r'config\.json: hidden_size is "64", and has to be'),
        (
            {"hidden_size": None},
            r"config\.json cannot be read as llama: Field 'hidden_size' expected int, got NoneType",
        ),
        ({"hidden_size": 65}, r"config\.json cannot be read as llama: The hidden size \(65\) is not a multiple"),
        (
            {"head_dim": "x"},
            r"cannot be read as llama: Field 'head_dim' with value 'x' doesn't match any type in \S+ .*\)$",
        ),
        ({"head_dim": -16}, r"negative dimension -64"),
        ({"model_type": "lama"}, r"config\.json: model_type 'lama' is not one that transformers knows"),
        ({"dtype": "nonsense"}, r"config\.json cannot be read as llama: .*nonsense"),
        ({"hidden_act": "nonsense"}, r"model of .*config\.json: hidden_act is 'nonsense', which it does not know"),
        (
            {"rope_parameters": {"rope_type": "nonsense"}},
            r"model of .*config\.json: rope_parameters\.rope_type is 'nonsense', which it does not know",
        ),
        ({"pad_token_id": 500}, r"llama language model of .*config\.json: AssertionError: Padding_idx must be within"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    source = _save(tmp_path)
    _edit_config(tmp_path, **changes)
    with pytest.raises(ModelLoadError, match=reason) as refused:
        load(source)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("changes", [{"head_dim": -16}, {"hidden_size": 1 << 60}])
def test_sizes_that_no_tensor_can_have_are_refused_without_weights_too(tmp_path: Path, changes: dict[str, int]) -> None:
    source = _save(tmp_path)
    _edit_config(tmp_path, **changes)
    with pytest.raises(ModelLoadError, match=r"llama language model of .*config\.json: RuntimeError: "):
        load(source, load_format="dummy")


def test_a_config_that_makes_no_model_is_refused_without_weights_too(tmp_path: Path) -> None:
    source = _save(tmp_path)
    _edit_config(tmp_path, hidden_act="nonsense")
    with pytest.raises(ModelLoadError, match=r"llama language model of .*config\.json: hidden_act is 'nonsense'"):
        load(source, load_format="dummy")
    assert readable(tmp_path) is None
    assert place({}, read_config(tmp_path), torch.float32, torch.device("cpu"), patching.LONGWAVE_PAGED) is None


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path) -> None:
    source = _save(tmp_path, dtype=torch.bfloat16)
    stored = readable(tmp_path)
    assert stored is not None
    whole = (tmp_path / WEIGHTS).read_bytes()
    _cut(tmp_path / WEIGHTS)
    reading = WeightReading(stored, torch.device("cpu"))
    reading._thread.join()
    (tmp_path / WEIGHTS).write_bytes(whole)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors became shorter while it was read"):
        load(source, dtype="bfloat16", reading=reading)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (GPTJConfig(vocab_size=64, n_embd=32, n_layer=1, n_head=2, rotary_dim=8), "gptj: .*attention code of its own"),
        (FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2), "falcon: .* its own"),
        (
            GPTNeoConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, attention_types=[[["global"], 2]]),
            "gpt_neo: .* its own",
        ),
        (BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2), "bloom: .* its own"),
        (MptConfig(vocab_size=64, d_model=32, n_layers=1, n_heads=2), "mpt: .* its own"),
        (CpmAntConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1), "cpmant: .* its own"),
        (
            WhisperConfig(vocab_size=64, pad_token_id=0, d_model=32, decoder_layers=1, decoder_attention_heads=2),
            "whisper: .*max_position",
        ),
        (
            RecurrentGemmaConfig(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=32,
                num_hidden_layers=1,
                num_attention_heads=2,
                lru_width=32,
            ),
            "recurrent_gemma: .*max_position",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_families_that_cannot_be_made_or_have_no_positions_are_refused_in_words(
    tmp_path: Path, config: PretrainedConfig, reason: str
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises((UnsupportedModelError, ModelLoadError), match=f"^{reason}"):
        load(ModelSource(name="tiny", folder=tmp_path), load_format="dummy")


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
    ("file", "content", "said"),
    [("config.json", "[]", r"config\.json holds no object"), ("tokenizer.json", "{}", "tiny has no tokenizer")],
)
def test_a_tokenizer_that_cannot_be_read_names_the_file_that_is_damaged(
    tmp_path: Path, bundled_source: ModelSource, file: str, content: str, said: str
) -> None:
    for original in bundled_source.fetch(weights=False).glob("*.json"):
        shutil.copy(original, tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(ModelLoadError, match=said):
        load_tokenizer(ModelSource(name="tiny", folder=tmp_path))


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
