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
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{source.name} has no tokenizer that transformers can read: {error}") from error


def read_config(folder: Path) -> PretrainedConfig:
    """Raises ModelLoadError for a family that transformers does not know."""
    raw: dict[str, Any] = json.loads((folder / "config.json").read_text())
    model_type = raw.get("model_type")
    if model_type not in CONFIG_MAPPING:
        own_code = " (it brings code of its own, which is never run)" if "auto_map" in raw else ""
        raise ModelLoadError(f"model_type {model_type!r} is not one that transformers knows{own_code}")
    return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def max_positions(source: ModelSource) -> int:
    """Of the text model, in tokens. Raises ModelLoadError."""
    positions: int = read_config(source.fetch(weights=False)).get_text_config().max_position_embeddings
    return positions
