"""A checkpoint with a tower for images or sound is told by its config.json, before its weights are downloaded. Imports
transformers for such checkpoints alone: of others, weights are read before it is there."""

from pathlib import Path

from models import config_file
from models.registry import ModelSource

#: What a tower is for; its part of a configuration is `<kind>_config`.
TOWERS = ("vision", "audio")


def fetch_text_model(source: ModelSource) -> Path:
    """The folder of a model and its weights, which are not downloaded for one whose config.json will be refused.

    Raises what `ModelSource.fetch` raises, ModelLoadError for a configuration that cannot be read, and
    models.patching.UnsupportedModelError.
    """
    if source.hub_id is not None:
        _refuse_towers(source.fetch(weights=False))
    return source.fetch()


def _refuse_towers(folder: Path) -> None:
    config = config_file.read(folder)
    if not any(config.get(f"{kind}_config") for kind in TOWERS):
        return
    from models.descriptions import read_config
    from models.patching import check_config

    check_config(read_config(folder))
