"""What config.json says whatever a model's family: read before anything loads, and so without transformers, which
judges the rest."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from models.errors import ModelLoadError

FILE = "config.json"
#: Sizes that families name so, GPT-2's names behind the others'. Some families list one for each layer.
COUNTS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
    "max_position_embeddings", "n_embd", "n_layer", "n_head", "n_positions",
)  # fmt: skip


def read(folder: Path) -> dict[str, Any]:
    """Raises ModelLoadError, which names the file and the field, for what is no model's configuration in any family."""
    path = folder / FILE
    config = read_object(path)
    if not isinstance(config.get("model_type"), str):
        raise _wrong(path, "model_type", config.get("model_type"), 'the name of a family, such as "llama"')
    for name in ("text_config", "quantization_config"):
        if not isinstance(config.get(name), dict | None):
            raise _wrong(path, name, config[name], "an object")
    for prefix, fields in (("", config), ("text_config.", config.get("text_config") or {})):
        _check_counts(path, prefix, fields)
        _check_attention(path, prefix, fields)
    return config


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object of a file of a model's folder. Raises ModelLoadError."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} holds no object, but {_told(content)}")
    return content


def fields_with(config: dict[str, Any], wanted: object, prefix: str = "") -> Iterator[str]:
    """The names of fields, also within others (`rope_parameters.rope_type`), that have this value."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from fields_with(value, wanted, f"{prefix}{name}.")
        elif value == wanted:
            yield prefix + name


def _check_counts(path: Path, prefix: str, config: dict[str, Any]) -> None:
    for name in COUNTS:
        value = config.get(name)
        is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if not is_count and not isinstance(value, list | None):
            raise _wrong(path, prefix + name, value, "a whole number above 0")


def _check_attention(path: Path, prefix: str, config: dict[str, Any]) -> None:
    heads, key_heads = (config.get(name) for name in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(key_heads, int) and heads % key_heads:
        raise _wrong(path, f"{prefix}num_key_value_heads", key_heads, f"a divisor of num_attention_heads, {heads}")
    scalar = config.get("query_pre_attn_scalar")  # Gemma's: scores are divided by its root
    is_number = isinstance(scalar, int | float) and not isinstance(scalar, bool) and scalar > 0
    if scalar is not None and not is_number:
        raise _wrong(path, f"{prefix}query_pre_attn_scalar", scalar, "a number above 0")


def _wrong(path: Path, name: str, value: object, expected: str) -> ModelLoadError:
    return ModelLoadError(f"{path}: {name} is {'missing' if value is None else _told(value)}, and has to be {expected}")


def _told(value: object) -> str:
    """As the file has it, on one line."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
