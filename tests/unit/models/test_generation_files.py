"""What generation_config.json says: end tokens and sampling, and what in it cannot be meant."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from models.errors import ModelLoadError
from models.generation_files import FILE, eos_token_ids, sampling_defaults


def folder_with(path: Path, **content: Any) -> Path:
    (path / FILE).write_text(json.dumps(content))
    return path


def test_sampling_is_what_the_file_names_and_no_default_of_transformers(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}
    folder_with(tmp_path, temperature=0.6, top_p=0.9, do_sample=True, max_new_tokens=7, top_k=None, eos_token_id=[1, 5])
    assert sampling_defaults(tmp_path) == {"temperature": 0.6, "top_p": 0.9}


def test_the_file_knows_more_end_tokens_than_the_model(tmp_path: Path) -> None:
    config = LlamaConfig(eos_token_id=2)
    assert eos_token_ids(tmp_path, config) == (2,)
    assert eos_token_ids(folder_with(tmp_path, eos_token_id=[2, 9]), config) == (2, 9)


@pytest.mark.parametrize("value", ["0.6", True, [1]])
def test_what_is_no_number_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(ModelLoadError, match=r"temperature is .*, not a number"):
        sampling_defaults(folder_with(tmp_path, temperature=value))


def test_what_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("{")
    with pytest.raises(ModelLoadError, match="is no JSON"):
        sampling_defaults(tmp_path)
