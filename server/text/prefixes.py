"""What a tokenizer puts in front of a text (SentencePiece's ▁), and texts that go on behind another, which have none.
Must not know requests or messages."""

import json
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from tokenizers import Tokenizer


class GoingOn:
    """Reads texts that go on behind a token as they are read together with what is in front of them."""

    def __init__(self, tokens: Tokenizer, state: Mapping[str, Any]) -> None:
        """`tokens`: which reads a text on its own; `state`: of its tokenizer.json."""
        self._whole = tokens
        self._added = frozenset(tokens.get_added_tokens_decoder())
        state = {**state, **{part: deepcopy(state[part]) for part in ("normalizer", "pre_tokenizer")}}
        schemes = [*_without_prepend(state), *_without_space(state)]
        #: Whether the prefix is put behind added tokens, too, and not only where a text begins.
        self._behind_added = "always" in schemes
        self._bare = Tokenizer.from_str(json.dumps(state)) if schemes else None
        if self._bare is not None:
            self._bare.encode_special_tokens = tokens.encode_special_tokens

    def encode(self, text: str, after: int) -> list[int]:
        """`after`: the token in front of `text`."""
        if self._bare is None or (self._behind_added and after in self._added):
            return self._alone(text)
        found = self._bare.encode_batch([text], add_special_tokens=False)[0]
        ids = list(found.ids)
        count = next((at for at, token in enumerate(ids) if token in self._added), None)
        return ids if count is None else [*ids[:count], *self._alone(text[found.offsets[count][0] :])]

    def _alone(self, text: str) -> list[int]:
        return list(self._whole.encode_batch_fast([text], add_special_tokens=False)[0].ids)


def _without_prepend(state: dict[str, Any]) -> list[str]:
    """Takes a normalizer of Llama 2's kind out of a tokenizer's state; where it was put, if it was there."""
    normalizer = state["normalizer"] or {"type": "Sequence", "normalizers": []}
    steps = normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
    others = [step for step in steps if step["type"] != "Prepend"]
    if len(others) == len(steps):
        return []
    state["normalizer"] = {"type": "Sequence", "normalizers": others}
    return ["always"]


def _without_space(state: dict[str, Any]) -> list[str]:
    """The same of what cuts texts into words, where that is the first to see them."""
    splitter = state["pre_tokenizer"] or {"type": "Sequence", "pretokenizers": []}
    steps: list[dict[str, Any]] = splitter["pretokenizers"] if splitter["type"] == "Sequence" else [splitter]
    if not steps:
        return []
    first = steps[0]
    if first["type"] == "Metaspace" and first["prepend_scheme"] != "never":
        scheme = str(first["prepend_scheme"])
        first["prepend_scheme"] = "never"
        return [scheme]
    if first["type"] == "ByteLevel" and first["add_prefix_space"]:
        first["add_prefix_space"] = False
        return ["always"]
    return []
