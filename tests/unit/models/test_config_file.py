"""What a config.json has to say in any family, and in which words it is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from models import config_file, registry
from models.errors import ModelLoadError

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 120}
COUNT = "and has to be a whole number above 0"
NAMED = 'and has to be the name of a family, such as "llama"'
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no family": ({"model_type": None}, f"model_type is missing, {NAMED}"),
    "family a number": ({"model_type": 5}, f"model_type is 5, {NAMED}"),
    "family a list": ({"model_type": ["llama"]}, f'model_type is ["llama"], {NAMED}'),
    "size a word": ({"hidden_size": "abc"}, f'hidden_size is "abc", {COUNT}'),
    "size a number in quotes": ({"hidden_size": "64"}, f'hidden_size is "64", {COUNT}'),
    "size a fraction": ({"intermediate_size": 96.5}, f"intermediate_size is 96.5, {COUNT}"),
    "layers below 0": ({"num_hidden_layers": -1}, f"num_hidden_layers is -1, {COUNT}"),
    "layers true": ({"num_hidden_layers": True}, f"num_hidden_layers is true, {COUNT}"),
    "no vocabulary": ({"vocab_size": 0}, f"vocab_size is 0, {COUNT}"),
    "no heads": ({"num_attention_heads": 0}, f"num_attention_heads is 0, {COUNT}"),
    "no positions": ({"max_position_embeddings": 0}, f"max_position_embeddings is 0, {COUNT}"),
    "GPT-2's name": ({"model_type": "gpt2", "n_embd": -8}, f"n_embd is -8, {COUNT}"),
    "size an object": ({"hidden_size": {"a": 0}}, f'hidden_size is {{"a": 0}}, {COUNT}'),
    "size a long word": ({"hidden_size": "9" * 99}, f'hidden_size is "{"9" * 59}..., {COUNT}'),
    "heads that no key head has": (
        {"num_attention_heads": 4, "num_key_value_heads": 3},
        "num_key_value_heads is 3, and has to be a divisor of num_attention_heads, 4",
    ),
    "more key heads than heads": (
        {"text_config": {"num_attention_heads": 2, "num_key_value_heads": 4}},
        "text_config.num_key_value_heads is 4, and has to be a divisor of num_attention_heads, 2",
    ),
    "scores over a root of less than nothing": (
        {"query_pre_attn_scalar": -256},
        "query_pre_attn_scalar is -256, and has to be a number above 0",
    ),
    "of the text model": ({"text_config": {"vocab_size": "many"}}, f'text_config.vocab_size is "many", {COUNT}'),
    "text model a number": ({"text_config": 5}, "text_config is 5, and has to be an object"),
    "quantised by a word": ({"quantization_config": "fp8"}, 'quantization_config is "fp8", and has to be an object'),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_field_that_cannot_be_meant_is_named_with_what_it_has_to_be(tmp_path: Path, name: str) -> None:
    changes, said = WRONG[name]
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    with pytest.raises(ModelLoadError) as refused:
        registry.resolve(str(tmp_path))
    assert str(refused.value) == f"{tmp_path / 'config.json'}: {said}"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is no JSON: Expecting value: line 1 column 1 (char 0)"),
        (b"{", "is no JSON: Expecting property name"),
        (b"\xff\xfe", "is no JSON: 'utf-8' codec"),
        (b"[" * 100_000, "is no JSON: maximum recursion depth"),
        (b"null", "holds no object, but null"),
        (b"[]", "holds no object, but []"),
        (b"5", "holds no object, but 5"),
    ],
)
def test_a_file_that_is_no_object_is_refused_by_name(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelLoadError) as refused:
        registry.resolve(str(tmp_path))
    assert str(refused.value).startswith(f"{tmp_path / 'config.json'} {said}")
    assert "\n" not in str(refused.value)


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json cannot be read: No such file or directory$"):
        config_file.read(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": None, "text_config": None, "quantization_config": None},
        {"intermediate_size": [96, 192]},  # Gemma 3n: one for each layer
        {"num_attention_heads": 4, "num_key_value_heads": 2, "query_pre_attn_scalar": 0.5},
        {"num_attention_heads": [4, 8], "num_key_value_heads": [2, 3]},  # OpenELM: likewise
        {"text_config": {"hidden_size": 64}, "quantization_config": {"quant_method": "fp8"}},
        {"hidden_act": 5, "sliding_window": 0},  # what they may be only their family knows
    ],
)
def test_what_may_be_meant_is_left_to_the_family(tmp_path: Path, changes: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    assert config_file.read(tmp_path) == {**LLAMA, **changes}


def test_fields_are_found_by_their_value_within_others_too() -> None:
    config = {"a": "x", "b": {"c": "x", "d": "y"}, "e": ["x"]}
    assert [*config_file.fields_with(config, "x")] == ["a", "b.c"]
