"""A training file as tokens; what cannot be learnt is named by its line and its file."""

import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from models import descriptions
from models.training import ExampleError, Outcome, TrainingPlan
from server.finetune import dataset as dataset_module
from server.finetune import worker
from server.finetune.dataset import DatasetError, read_dataset
from server.finetune.folders import JobFolder
from server.finetune.messages import Arguments, LastWord, Refused, Stopped
from server.text.operators_template import OperatorsTemplate
from server.text.tokenizer import BYTE_OF_CHARACTER, TextTokenizer


def pairs(path: Path, *completions: str) -> Path:
    lines = [json.dumps({"prompt": "a", "completion": completion}) for completion in completions]
    path.write_text("\n".join(lines))  # the last line needs no newline
    return path


def test_every_line_is_an_example_in_order(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    read = read_dataset(pairs(tmp_path / "x", "b", "cc", "d"), tokenizer, 10, "training_file")
    assert [len(example) for example in read.examples] == [3, 4, 3]
    assert (read.tokens, read.longest) == (10, 4)


def test_a_vocabulary_may_have_holes(tmp_path: Path) -> None:
    """Its highest id is not below the number of its tokens."""
    vocabulary = {character: token for token, character in enumerate(BYTE_OF_CHARACTER)} | {"<eos>": 999}
    source = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    source.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    source.decoder = decoders.ByteLevel()
    tokenizer = TextTokenizer(PreTrainedTokenizerFast(tokenizer_object=source, eos_token="<eos>"))
    read = read_dataset(pairs(tmp_path / "x", "b"), tokenizer, 10, "training_file")
    assert [example.tokens[-1] for example in read.examples] == [999]


def test_a_job_that_trains_keeps_the_length_under_which_its_files_were_validated(
    tmp_path: Path, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "model_source", lambda _: None)
    monkeypatch.setattr(descriptions, "load_tokenizer", lambda _: tokenizer.source)
    monkeypatch.setattr(descriptions, "max_positions", lambda _: 4096)
    pairs(tmp_path / "training_file.jsonl", "c" * 10)
    plan = TrainingPlan("base", max_length=12).to_json()

    def serve(stage: str, plan: str | None) -> LastWord:
        arguments = Arguments(
            stage, "base", "supervised", str(tmp_path), "cpu", None, None, 8, plan, False, os.getpid(), 20
        )
        trains = Mock(run=lambda _: Outcome(False, 0, 0, None))
        return worker.serve(arguments, Mock(), lambda *_, **__: trains)

    refused = serve("validate", None)
    assert isinstance(refused, Refused)
    assert refused.message == "Line 1: it has 12 tokens; an example may have 8."
    assert serve("train", plan) == Stopped()


@pytest.mark.parametrize("in_validation", [False, True])
def test_what_a_trainer_has_against_an_example_is_named_by_its_line(
    tmp_path: Path, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch, in_validation: bool
) -> None:
    """Where the first line is two examples: its template forgets answers."""
    forgets = "{% for m in messages %}{{ m.content if loop.last or m.role == 'user' }};{% endfor %}"
    monkeypatch.setattr(worker, "model_source", lambda _: None)
    monkeypatch.setattr(descriptions, "load_tokenizer", lambda _: tokenizer.source)
    monkeypatch.setattr(descriptions, "max_positions", lambda _: 4096)
    JobFolder(tmp_path).keep_template(OperatorsTemplate(forgets))
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for name in ("training_file", "validation_file"):
        chats = [json.dumps({"messages": turn * turns}) for turns in (2, 1)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(chats))
    plan = TrainingPlan("base").to_json()
    arguments = Arguments("train", "base", "supervised", str(tmp_path), "cpu", None, None, None, plan, True, 1, 20)
    error = ExampleError("a token id is outside the vocabulary", 2)
    error.in_validation = in_validation
    refused = worker.serve(arguments, Mock(), lambda *_, **__: Mock(run=Mock(side_effect=error)))
    name = "validation_file" if in_validation else "training_file"
    assert refused == Refused(f"invalid_{name}", "Line 2: a token id is outside the vocabulary", name)


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
