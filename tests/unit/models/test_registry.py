"""Names to sources, and what is said about names that are none."""

from pathlib import Path

import pytest

from models.errors import ModelLoadError, ModelNotFoundError
from models.registry import ModelSource, resolve


@pytest.mark.parametrize("name", ["bundled", "SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_the_bundled_model_has_three_names(name: str) -> None:
    assert resolve(name) == ModelSource(name="SmolLM2-135M-Instruct", bundled=True)


def test_the_bundled_model_is_looked_for_where_it_was_said_to_be(tmp_path: Path) -> None:
    source = resolve("bundled", cache_dir=tmp_path / "cache", image_dir=tmp_path / "image")
    assert (source.cache_dir, source.image_dir) == (tmp_path / "cache", tmp_path / "image")


def test_a_folder_is_named_after_itself(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    source = resolve(str(folder))
    assert (source.name, source.folder, source.fetch()) == ("my-model", folder, folder)


def test_a_hub_id_is_resolved_without_the_network() -> None:
    assert resolve("meta-llama/Llama-3.1-8B-Instruct") == ModelSource(
        name="meta-llama/Llama-3.1-8B-Instruct", hub_id="meta-llama/Llama-3.1-8B-Instruct"
    )


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        resolve(str(tmp_path))


def test_a_single_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(ModelLoadError, match="name the folder"):
        resolve(str(file))


@pytest.mark.parametrize("name", ["nothing", "a/b/c", "/no/such/folder", "http://example.com/x", "../x"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="bundled SmolLM2-135M-Instruct"):
        resolve(name)
