"""A training file as tokens; what cannot be learnt is named by its line and its file."""

import json
from pathlib import Path

import pytest

from server.finetune import dataset as dataset_module
from server.finetune.dataset import DatasetError, read_dataset
from server.text.tokenizer import TextTokenizer


def pairs(path: Path, *completions: str) -> Path:
    lines = [json.dumps({"prompt": "a", "completion": completion}) for completion in completions]
    path.write_text("\n".join(lines))  # the last line needs no newline
    return path


def test_every_line_is_an_example_in_order(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    read = read_dataset(pairs(tmp_path / "x", "b", "cc", "d"), tokenizer, 10, "training_file")
    assert [len(example) for example in read.examples] == [3, 4, 3]
    assert (read.tokens, read.longest) == (10, 4)


def test_an_example_too_long_is_named_by_its_line(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    with pytest.raises(DatasetError, match=r"^Line 2: it has 12 tokens; an example may have 10\.$") as error:
        read_dataset(pairs(tmp_path / "x", "b", "c" * 10), tokenizer, 10, "validation_file")
    assert error.value.param == "validation_file"


def test_what_the_model_cannot_learn_is_named_by_its_line(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    path = tmp_path / "x"
    path.write_text(json.dumps({"messages": [{"role": "assistant", "content": "x"}]}) + "\n")
    with pytest.raises(DatasetError, match=r"^Line 1: messages\[0\] is the assistant's"):
        read_dataset(path, tokenizer, 10, "training_file")


def test_the_tokens_of_a_file_are_bounded(
    tmp_path: Path, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_module, "MAX_TOKENS", 5)
    with pytest.raises(DatasetError, match="more than 5 tokens"):
        read_dataset(pairs(tmp_path / "x", "b", "c"), tokenizer, 10, "training_file")
