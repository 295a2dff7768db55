"""What a model's files say without its weights: its tokenizer, its configuration. Needs no torch."""

from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from models import config_file
from models.errors import ModelLoadError
from models.registry import ModelSource


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """For a process that knows text. Raises ModelLoadError."""
    folder = source.fetch(weights=False)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of a damaged file, Exception itself
        read_config(folder)  # transformers reads that one, too: what is wrong there is no fault of the tokenizer's
        raise ModelLoadError(f"{source.name} has no tokenizer that transformers can read: {error}") from error


def read_config(folder: Path) -> PretrainedConfig:
    """Raises ModelLoadError for what is no configuration, and for a family that transformers does not know."""
    path = folder / config_file.FILE
    raw = config_file.read(folder)
    model_type = raw["model_type"]
    if model_type not in CONFIG_MAPPING:
        own_code = " (it brings code of its own, which is never run)" if "auto_map" in raw else ""
        raise ModelLoadError(f"{path}: model_type {model_type!r} is not one that transformers knows{own_code}")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a family's own class raises what it likes
        raise ModelLoadError(f"{path} cannot be read as {model_type}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """On one line. Classes that check their fields wrap what says which one is wrong."""
    if isinstance(error, StrictDataclassError) and error.__cause__ is not None:
        said, _, _ = str(error.__cause__).partition(". Errors: ")  # one for each type that it might have
        return " ".join(said.split())
    return " ".join(f"{type(error).__name__}: {error}".split())


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
