"""Texts that a tokenizer encodes to exactly so many tokens, for servers that take no token ids. Knows no server."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from server.bench.workload import Conversation

FEWEST_WORDS = 64


class InexactTokenizerError(ValueError):
    """No text of known length can be made with this tokenizer."""


class ExactText:
    """Words that are one token each wherever they stand."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special_tokens = len(self._encode(""))
        ids = range(len(tokenizer))
        words = [f" {text.strip()}" for text in tokenizer.batch_decode([[token] for token in ids])]
        plain = [(token, word) for token, word in zip(ids, words, strict=True) if word.isascii() and word[1:].isalnum()]
        encoded = tokenizer([word for _, word in plain], add_special_tokens=False)["input_ids"] if plain else []
        self.words = {token: word for (token, word), found in zip(plain, encoded, strict=True) if found == [token]}
        if len(self.words) < FEWEST_WORDS:
            raise InexactTokenizerError(f"only {len(self.words)} words are one token each: send token ids instead")

    @property
    def vocabulary(self) -> Sequence[int]:
        return list(self.words)

    def as_text(self, conversation: Conversation) -> Conversation:
        """The same turns as texts, the tokenizer's special tokens counted in. Raises InexactTokenizerError."""
        turns = []
        for turn in conversation:
            text = "".join(self.words[token] for token in turn.prompt if isinstance(token, int))
            count = turn.prompt_tokens + self._special_tokens
            if (found := len(self._encode(text))) != count:
                raise InexactTokenizerError(f"{count} tokens became {found} as text: send token ids instead")
            turns.append(replace(turn, prompt=text, prompt_tokens=count))
        return tuple(turns)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids
