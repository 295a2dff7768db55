"""What generation_config.json says: end tokens and sampling, and what in it cannot be meant."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, RoCBertConfig

from models.errors import ModelLoadError
from models.generation_files import FILE, eos_token_ids, sampling_defaults, warn_of_rest


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


def test_end_token_0_is_one(tmp_path: Path) -> None:
    assert eos_token_ids(folder_with(tmp_path, eos_token_id=0), LlamaConfig(eos_token_id=2)) == (0,)


def test_a_model_without_end_tokens_has_none(tmp_path: Path) -> None:
    assert eos_token_ids(tmp_path, LlamaConfig(eos_token_id=None)) == ()
    assert eos_token_ids(tmp_path, RoCBertConfig()) == ()


@pytest.mark.parametrize("value", ["x", True, 2.0, [2, "x"], [[2]]])
def test_an_end_token_that_is_no_whole_number_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(ModelLoadError, match="end tokens are whole numbers"):
        eos_token_ids(folder_with(tmp_path, eos_token_id=value), LlamaConfig())


def test_end_tokens_outside_the_vocabulary_are_left_out_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder_with(tmp_path, eos_token_id=[2, 120, -1])
    assert eos_token_ids(tmp_path, LlamaConfig(vocab_size=120)) == (2,)
    assert "end tokens 120, -1 are left out: the vocabulary has 120 tokens" in caplog.text


def test_what_is_asked_for_and_not_applied_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_rest({"temperature": 0.6, "no_repeat_ngram_size": 0, "suppress_tokens": [], "forced_eos_token_id": None})
    assert not caplog.records
    warn_of_rest({"no_repeat_ngram_size": 3, "suppress_tokens": [5], "stop_strings": "END"})
    assert [record.getMessage() for record in caplog.records] == [
        f"{FILE} asks for no_repeat_ngram_size, stop_strings, suppress_tokens, which is not applied"
    ]


@pytest.mark.parametrize("value", ["0.6", True, [1]])
def test_what_is_no_number_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(ModelLoadError, match=r"temperature is .*, not a number"):
        sampling_defaults(folder_with(tmp_path, temperature=value))


@pytest.mark.parametrize(
    ("content", "reason"), [(b"{", "is no JSON"), (b"\xff", "is no JSON"), (b"[]", "no object"), (b"null", "no object")]
)
def test_what_is_no_json_object_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / FILE).write_bytes(content)
    for read in (sampling_defaults, lambda folder: eos_token_ids(folder, LlamaConfig())):
        with pytest.raises(ModelLoadError, match=rf"generation_config\.json.* {reason}"):
            read(tmp_path)
