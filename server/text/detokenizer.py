"""Token ids, a few at a time, to text that never shows half a character. join(deltas) == decode(all ids).
Must not know stop strings or requests."""

import codecs
from collections.abc import Sequence
from typing import Protocol

from server.text.tokenizer import TextTokenizer

REPLACEMENT = "\ufffd"  # what decoders put for bytes that are no UTF-8 (yet)
NUM_CONTEXT_TOKENS = 6  # prompt tokens that decide how the first generated one is spelled (leading spaces)
LONGEST_UNFINISHED = 64  # tokens: a longer run of lone bytes is shown as it is, or a stream could stall for ever


class Detokenizer(Protocol):
    def feed(self, token_ids: Sequence[int]) -> str: ...

    def finish(self) -> str:
        """What was held back: bytes that never became a character."""
        ...


class ByteDetokenizer:
    """For byte-level vocabularies: every token is some bytes, so text is one incremental UTF-8 decoding of them."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        skipped = self._tokenizer.special_ids
        shown = (self._tokenizer.token_bytes(token) for token in token_ids if token not in skipped)
        return self._decoder.decode(b"".join(shown))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For every other vocabulary: decodes a short window twice, with and without the new tokens, and shows the rest.

    The window starts at tokens whose text is already shown, so decoders that look at neighbours (leading spaces, byte
    fallback) see the same neighbours both times.
    """

    def __init__(self, tokenizer: TextTokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = [token for token in context[-NUM_CONTEXT_TOKENS:] if token not in tokenizer.special_ids]
        self._num_shown = len(self._window)  # tokens at the window's start whose text is shown

    def feed(self, token_ids: Sequence[int]) -> str:
        skipped = self._tokenizer.special_ids
        return "".join(self._feed_one(token) for token in token_ids if token not in skipped)

    def finish(self) -> str:
        return self._show() if self._num_shown < len(self._window) else ""

    def _feed_one(self, token_id: int) -> str:
        self._window.append(token_id)
        may_wait = len(self._window) - self._num_shown < LONGEST_UNFINISHED
        return "" if may_wait and self._is_unfinished(token_id) else self._show()

    def _is_unfinished(self, token_id: int) -> bool:
        """In a run of byte tokens, one bad byte makes all of them U+FFFD: none is certain before the run ends."""
        is_byte = self._tokenizer.is_byte_fallback(token_id)
        return is_byte or self._tokenizer.decode(self._window).endswith(REPLACEMENT)

    def _show(self) -> str:
        before = self._tokenizer.decode(self._window[: self._num_shown])
        text = self._tokenizer.decode(self._window)[len(before) :]
        self._window = self._window[self._num_shown :]
        self._num_shown = len(self._window)
        return text


def detokenizer_for(tokenizer: TextTokenizer, context: Sequence[int]) -> Detokenizer:
    """`context`: the prompt, whose last tokens may decide the spelling of the first new one."""
    return ByteDetokenizer(tokenizer) if tokenizer.is_byte_level else WindowDetokenizer(tokenizer, context)
