"""What a model's files say of generating: the tokens that end an answer, and the sampling its authors ask for."""

import json
from pathlib import Path

from transformers import GenerationConfig, PretrainedConfig

from models.errors import ModelLoadError

FILE = "generation_config.json"
#: Of vLLM's, those that a request can name, too. A limit of new tokens is no sampling: it would cut long answers.
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def eos_token_ids(folder: Path, config: PretrainedConfig) -> tuple[int, ...]:
    """generation_config.json knows every end token of a chat model; config.json often only one."""
    ids = config.eos_token_id
    if (folder / FILE).is_file():
        ids = GenerationConfig.from_pretrained(folder).eos_token_id or ids
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list | tuple) else (ids,)


def sampling_defaults(folder: Path) -> dict[str, float]:
    """Some of SAMPLING: what the file names, and not transformers' own defaults. Raises ModelLoadError."""
    if not (folder / FILE).is_file():
        return {}
    try:
        content = json.loads((folder / FILE).read_text())
    except ValueError as error:
        raise ModelLoadError(f"{FILE} of {folder} is no JSON: {error}") from error
    asked = {name: content[name] for name in SAMPLING if content.get(name) is not None}
    for name, value in asked.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelLoadError(f"{FILE} of {folder}: {name} is {value!r}, not a number")
    return asked
