"""What a model's files say of generating: the tokens that end an answer, and the sampling its authors ask for."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from models.config_file import read_object
from models.errors import ModelLoadError

FILE = "generation_config.json"
#: Of vLLM's, those that a request can name, too. A limit of new tokens is no sampling: it would cut long answers.
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
#: By which transformers' `generate` chooses or ends otherwise, sampling or not.
NOT_APPLIED = (
    "bad_words_ids", "begin_suppress_tokens", "exponential_decay_length_penalty", "forced_bos_token_id",
    "forced_decoder_ids", "forced_eos_token_id", "min_length", "min_new_tokens", "no_repeat_ngram_size",
    "sequence_bias", "stop_strings", "suppress_tokens",
)  # fmt: skip

logger = logging.getLogger(__name__)


def read_generation(folder: Path) -> dict[str, Any]:
    """Of generation_config.json; empty without one. Raises ModelLoadError."""
    path = folder / FILE
    return read_object(path) if path.is_file() else {}


def warn_of_rest(generation: Mapping[str, Any]) -> None:
    """Logs what would change answers of transformers' `generate`, and does not change ours."""
    named = [name for name in NOT_APPLIED if generation.get(name) not in (None, 0, [], {})]
    if named:
        logger.warning("%s asks for %s, which is not applied", FILE, ", ".join(named))


def eos_token_ids(folder: Path, config: PretrainedConfig) -> tuple[int, ...]:
    """generation_config.json knows every end token of a chat model; config.json often only one. Those that the
    vocabulary lacks never come and are left out. Raises ModelLoadError."""
    ids = read_generation(folder).get("eos_token_id")
    if ids is None or ids == []:
        ids = getattr(config, "eos_token_id", None)
    listed = ids if isinstance(ids, list | tuple) else [] if ids is None else [ids]
    for token in listed:
        if isinstance(token, bool) or not isinstance(token, int):
            raise ModelLoadError(f"eos_token_id of {folder} is {ids!r}: end tokens are whole numbers")
    outside = [token for token in listed if not 0 <= token < config.vocab_size]
    if outside:
        logger.warning(
            "end tokens %s are left out: the vocabulary has %d tokens", ", ".join(map(str, outside)), config.vocab_size
        )
    return tuple(token for token in listed if token not in outside)


def sampling_defaults(folder: Path) -> dict[str, float]:
    """Some of SAMPLING: what the file names, and not transformers' own defaults. Raises ModelLoadError."""
    content = read_generation(folder)
    asked = {name: content[name] for name in SAMPLING if content.get(name) is not None}
    for name, value in asked.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelLoadError(f"{FILE} of {folder}: {name} is {value!r}, not a number")
    return asked
