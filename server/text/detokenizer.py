"""Token ids, one at a time, to text that never shows half a character. join(deltas) == decode(all ids), unless a long
run of bytes breaks after its beginning was shown. Must not know stop strings or requests."""

import codecs
from collections.abc import Sequence
from itertools import dropwhile
from typing import Protocol

from server.text.tokenizer import TextTokenizer

REPLACEMENT = "\ufffd"  # what decoders put for bytes that are no UTF-8 (yet)
NUM_CONTEXT_TOKENS = 6  # prompt tokens that decide how the first generated one is spelled (leading spaces)
LONGEST_UNFINISHED = 64  # tokens: of a longer run of bytes, whole characters are shown; no stream stalls for ever


class Detokenizer(Protocol):
    def feed(self, token_id: int) -> str: ...

    def finish(self) -> str:
        """What was held back: bytes that never became a character."""
        ...

    def held(self) -> str:
        """What is held back although it may be whole: it is text if nothing follows."""
        ...

    def num_held_before(self, token_id: int | None) -> int:
        """How many characters of what is held back stand in front of the token that follows (None: of the end): not
        the one that it goes on with."""
        ...


class ByteDetokenizer:
    """For byte-level vocabularies: every token is some bytes, so text is one incremental UTF-8 decoding of them."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        if token_id in self._tokenizer.special_ids:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)

    def held(self) -> str:
        return ""

    def num_held_before(self, token_id: int | None) -> int:
        unfinished, _ = self._decoder.getstate()
        if not unfinished or token_id in self._tokenizer.special_ids:
            return 0
        first = b"" if token_id is None else self._tokenizer.token_bytes(token_id)[:1]
        # The byte that follows is in the last of these, whether that goes on or begins with it.
        return len((unfinished + first).decode("utf-8", errors="replace")) - len(first)


class WindowDetokenizer:
    """For every other vocabulary: decodes a short window twice, with and without the new token, and shows the rest.

    The window starts at tokens whose text is already shown, so decoders that look at neighbours (leading spaces, byte
    fallback) see the same neighbours both times.
    """

    def __init__(self, tokenizer: TextTokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = self._end_of(context)
        self._num_shown = len(self._window)  # tokens at the window's start whose text is shown

    def feed(self, token_id: int) -> str:
        if token_id in self._tokenizer.special_ids:
            return ""
        self._window.append(token_id)
        if len(self._window) - self._num_shown >= LONGEST_UNFINISHED:
            return self._show(self._num_whole(self._window))
        return "" if self._is_unfinished(token_id) else self._show(len(self._window))

    def finish(self) -> str:
        return self._show(len(self._window)) if self._num_shown < len(self._window) else ""

    def held(self) -> str:
        end = len(self._window)
        may_be_whole = end > self._num_shown and self._tokenizer.is_byte_fallback(self._window[-1])
        return self._text(self._window) if may_be_whole and self._num_whole(self._window) == end else ""

    def num_held_before(self, token_id: int | None) -> int:
        """Of a run of bytes that a later one will break, as if it stayed whole: that is not foreseen."""
        held = self._window
        if len(held) == self._num_shown or token_id in self._tokenizer.special_ids:
            return 0
        text = self._text(held)
        if token_id is None:
            return len(text)
        with_it = [*held, token_id]
        if all(map(self._tokenizer.is_byte_fallback, with_it[-2:])):
            breaks = self._num_unfinished(with_it) is None
            return len(self._text(with_it)) - 1 if breaks else len(self._text(held[: self._num_whole(held)]))
        longer = self._text(with_it)
        stays = longer.startswith(text) and len(longer) > len(text)
        return len(text if stays else text.rstrip(REPLACEMENT))

    def _is_unfinished(self, token_id: int) -> bool:
        """In a run of byte tokens, one bad byte makes all of them U+FFFD: none is certain before the run ends."""
        is_byte = self._tokenizer.is_byte_fallback(token_id)
        return is_byte or self._tokenizer.decode(self._window).endswith(REPLACEMENT)

    def _show(self, end: int) -> str:
        text = self._text(self._window[:end])
        self._window, self._num_shown = self._window[self._num_shown :], end - self._num_shown
        return text

    def _text(self, tokens: Sequence[int]) -> str:
        """Of those that are not shown: `tokens` begin as the window does."""
        before = self._tokenizer.decode(self._window[: self._num_shown])
        text = self._tokenizer.decode(tokens)
        if not text.startswith(before):  # what follows broke the run that was shown: it is U+FFFD for each byte now
            run = self._run_start(self._window, self._num_shown)
            before = self._tokenizer.decode(self._window[:run]) + REPLACEMENT * (self._num_shown - run)
        return text[len(before) :]

    def _end_of(self, context: Sequence[int]) -> list[int]:
        """From the beginning of a run of bytes, or of a character in it where the run is long, to a whole character."""
        skipped, end = self._tokenizer.special_ids, context[-NUM_CONTEXT_TOKENS - LONGEST_UNFINISHED :]
        known = [token for token in end if token not in skipped]
        if len(end) < len(context):
            known = list(dropwhile(self._continues_character, known))
        start = self._run_start(known, max(0, len(known) - NUM_CONTEXT_TOKENS))
        return known[start : self._num_whole(known)]

    def _run_start(self, tokens: Sequence[int], end: int) -> int:
        """Where the run of byte tokens in front of `end` begins."""
        while end and self._tokenizer.is_byte_fallback(tokens[end - 1]):
            end -= 1
        return end

    def _num_whole(self, tokens: Sequence[int]) -> int:
        """How many of them come before the unfinished character of a run of bytes that ends them: all, if it has none,
        or is broken."""
        return len(tokens) - (self._num_unfinished(tokens) or 0)

    def _num_unfinished(self, tokens: Sequence[int]) -> int | None:
        """How many bytes of a run that ends them are the beginning of a character. None: the run is broken."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            for token in tokens[self._run_start(tokens, len(tokens)) :]:
                decoder.decode(self._tokenizer.token_bytes(token))
        except UnicodeDecodeError:
            return None
        return len(decoder.getstate()[0])

    def _continues_character(self, token_id: int) -> bool:
        return self._tokenizer.is_byte_fallback(token_id) and self._tokenizer.token_bytes(token_id)[0] & 0xC0 == 0x80


def detokenizer_for(tokenizer: TextTokenizer, context: Sequence[int]) -> Detokenizer:
    """`context`: the prompt, whose last tokens may decide the spelling of the first new one."""
    return ByteDetokenizer(tokenizer) if tokenizer.is_byte_level else WindowDetokenizer(tokenizer, context)
