"""Names to sources, and what is said about names that are none."""

from pathlib import Path

import pytest
from huggingface_hub import constants

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
    (folder / "config.json").write_text('{"model_type": "llama"}')
    source = resolve(str(folder))
    assert (source.name, source.folder, source.fetch()) == ("my-model", folder, folder)


def test_a_hub_id_is_resolved_without_the_network() -> None:
    assert resolve("meta-llama/Llama-3.1-8B-Instruct") == ModelSource(
        name="meta-llama/Llama-3.1-8B-Instruct", hub_id="meta-llama/Llama-3.1-8B-Instruct"
    )


@pytest.mark.parametrize("revision", ["v1.0", "refs/pr/3", "0" * 40])
def test_a_hub_id_may_name_a_revision(revision: str) -> None:
    assert resolve(f"owner/name@{revision}") == ModelSource(name="owner/name", hub_id="owner/name", revision=revision)


def test_a_revision_is_what_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the hub's cache, as it lies on a disk."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository, commits = tmp_path / "models--owner--name", {"main": "a" * 40, "v1": "b" * 40}
    for name, commit in commits.items():
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / name).write_text(commit)
        (repository / "snapshots" / commit).mkdir(parents=True)
    assert resolve("owner/name").fetch().name == commits["main"]
    assert resolve("owner/name@v1").fetch(weights=False).name == commits["v1"]
    assert resolve(f"owner/name@{commits['v1']}").fetch().name == commits["v1"]
    with pytest.raises(ModelNotFoundError, match=r"owner/name at v2 is not in the local hub cache"):
        resolve("owner/name@v2").fetch()


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        resolve(str(tmp_path))


def test_a_single_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(ModelLoadError, match="name the folder"):
        resolve(str(file))


@pytest.mark.parametrize(
    "name", ["nothing", "a/b/c", "/no/such/folder", "http://example.com/x", "../x", "a/b@", "a/b@c d"]
)
def test_other_names_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # what lies beside a checkout may have one of these names
    with pytest.raises(ModelNotFoundError, match="bundled SmolLM2-135M-Instruct"):
        resolve(name)
