"""Checkpoints with towers are refused by their config.json, before anybody looks for weights."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_config
from transformers import (
    Gemma3Config,
    Gemma3nConfig,
    Llama4Config,
    LlavaConfig,
    PretrainedConfig,
    Qwen2AudioConfig,
    Qwen3_5Config,
)

from models import registry
from models.errors import ModelLoadError
from models.loader import load, load_for_training
from models.patching import UnsupportedModelError, check_config
from models.registry import ModelSource
from models.stages import Stages
from models.towers import fetch_text_model
from server.engine import loading
from server.engine.config import EngineConfig
from server.engine.runner import CannotServeError

WITH_TOWERS: dict[str, tuple[PretrainedConfig, str]] = {
    "gemma3": (Gemma3Config(), "vision"),
    "gemma3n": (Gemma3nConfig(), "vision and audio"),
    "llava": (LlavaConfig(), "vision"),  # of which transformers makes no causal language model
    "qwen2_audio": (Qwen2AudioConfig(), "audio"),
}


def _no_weights(_folder: Path) -> None:
    pass


def _corrupt(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 4096)


def _whole(folder: Path) -> None:
    """A header that is right and names nothing of the model."""
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")


@pytest.fixture(params=WITH_TOWERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def reason(name: str) -> str:
    return f"^{name}: it has a tower for {WITH_TOWERS[name][1]}: only text models are served$"


@pytest.fixture(params=[_no_weights, _corrupt, _whole], ids=lambda weights: weights.__name__)
def folder(request: pytest.FixtureRequest, name: str, tmp_path: Path) -> Path:
    WITH_TOWERS[name][0].save_pretrained(tmp_path)
    request.param(tmp_path)
    return tmp_path


def test_a_checkpoint_with_a_tower_is_refused_whatever_its_weights_are(folder: Path, reason: str) -> None:
    source = ModelSource(name="towers", folder=folder)
    with pytest.raises(UnsupportedModelError, match=reason):
        load(source)
    with pytest.raises(UnsupportedModelError, match=reason):
        load_for_training(source, dtype="float32")


def engine_config(model: str) -> EngineConfig:
    """With little memory for a KV cache: its touching begins before the model is known."""
    return EngineConfig(model=model, device="cpu", kv_cache_memory_bytes=1 << 20)


def test_the_engine_says_the_same(folder: Path, reason: str) -> None:
    with pytest.raises(CannotServeError, match=reason):
        loading.load(engine_config(str(folder)), Stages())


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """What would have been asked of the hub for: patterns of files, call by call. Nothing is."""
    asked: list[list[str]] = []
    monkeypatch.setattr(registry, "_download", lambda _id, _revision, patterns: asked.append(patterns) or tmp_path)
    return asked


@pytest.mark.parametrize("fetch", [fetch_text_model, load, lambda source: load_for_training(source, dtype="float32")])
def test_the_hub_is_not_asked_for_weights_that_would_be_refused(
    downloads: list[list[str]], tmp_path: Path, fetch: Callable[[ModelSource], Any]
) -> None:
    Gemma3Config().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="tower for vision"):
        fetch(ModelSource(name="owner/towers", hub_id="owner/towers"))
    assert downloads
    assert not any("*.safetensors" in patterns for patterns in downloads)


def test_the_engine_does_not_ask_for_them_either(downloads: list[list[str]], tmp_path: Path) -> None:
    Gemma3Config().save_pretrained(tmp_path)
    with pytest.raises(CannotServeError, match="tower for vision"):
        loading.load(engine_config("owner/towers"), Stages())
    assert downloads
    assert not any("*.safetensors" in patterns for patterns in downloads)


@pytest.mark.parametrize("config", [tiny_config(), Llama4Config(), Qwen3_5Config()], ids=lambda it: it.model_type)
def test_what_transformers_makes_a_text_model_of_is_fetched_with_its_weights(
    downloads: list[list[str]], tmp_path: Path, config: PretrainedConfig
) -> None:
    config.save_pretrained(tmp_path)
    check_config(config)
    assert fetch_text_model(ModelSource(name="owner/text", hub_id="owner/text")) == tmp_path
    assert "*.safetensors" in downloads[-1]


def test_a_config_whose_tower_is_null_has_none(downloads: list[list[str]], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vision_config": null}')
    assert fetch_text_model(ModelSource(name="owner/other", hub_id="owner/other")) == tmp_path
    assert "*.safetensors" in downloads[-1]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"model_type": "llama", "vocab_size": 0}'])
def test_the_hub_is_not_asked_for_weights_of_a_config_that_is_none(
    downloads: list[list[str]], tmp_path: Path, text: str
) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CannotServeError, match=r"config\.json"):
        loading.load(engine_config("owner/other"), Stages())
    assert len(downloads) == 1
    assert "*.safetensors" not in downloads[0]


def test_a_config_with_towers_that_nobody_knows_is_refused_in_words(downloads: list[list[str]], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nobody", "vision_config": {"depth": 3}}')
    with pytest.raises(ModelLoadError, match="'nobody' is not one that transformers knows"):
        fetch_text_model(ModelSource(name="owner/new", hub_id="owner/new"))
    assert len(downloads) == 1


def test_models_without_towers_need_no_transformers_to_be_fetched(tmp_path: Path) -> None:
    """In a process of its own: weights are read before that is imported."""
    import subprocess

    code = (
        "import sys; from pathlib import Path; from models import registry, towers\n"
        "folder = Path(sys.argv[1]); registry._download = lambda *_: folder\n"
        "towers.fetch_text_model(registry.resolve('owner/model')); sys.exit('transformers' in sys.modules)"
    )
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=Path(__file__).parents[3])
