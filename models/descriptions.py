"""What a model's files say without its weights: its tokenizer, its configuration. Needs no torch."""

import json
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from models.errors import ModelLoadError
from models.registry import ModelSource


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """For a process that knows text. Raises ModelLoadError."""
    folder = source.fetch(weights=False)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of a damaged file, Exception itself
        raise ModelLoadError(f"{source.name} has no tokenizer that transformers can read: {error}") from error


def read_config(folder: Path) -> PretrainedConfig:
    """Raises ModelLoadError for what is no configuration, and for a family that transformers does not know."""
    path = folder / "config.json"
    try:
        raw: Any = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} is no JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelLoadError(f"{path} holds no object")
    model_type = raw.get("model_type")
    if str(model_type) not in CONFIG_MAPPING:
        own_code = " (it brings code of its own, which is never run)" if "auto_map" in raw else ""
        raise ModelLoadError(f"model_type {model_type!r} is not one that transformers knows{own_code}")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a family's own class raises what it likes
        raise ModelLoadError(f"{path} cannot be read as {model_type}: {type(error).__name__}: {error}") from error


def max_positions(source: ModelSource) -> int:
    """Of the text model, in tokens. Raises ModelLoadError."""
    return positions_of(read_config(source.fetch(weights=False)))


def positions_of(config: PretrainedConfig) -> int:
    """The same, of a configuration."""
    text_config = config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None)
    if not isinstance(positions, int):
        raise ModelLoadError(f"{text_config.model_type}: its config does not say max_position_embeddings")
    return positions
