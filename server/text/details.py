"""What log-probabilities say of tokens, spelled out: of any token, and of a prompt's own from its first to its last.
Must not know the wire format or the engine's requests."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from models.batch import PromptLogprobs
from server.text.detokenizer import detokenizer_for
from server.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that was likely at some place."""

    text: str
    bytes: bytes
    logprob: float

    @classmethod
    def of(cls, tokenizer: TextTokenizer, token_id: int, logprob: float) -> "Candidate":
        spelled = tokenizer.token_bytes(token_id)
        return cls(spelled.decode("utf-8", errors="replace"), spelled, logprob)


@dataclass(frozen=True, slots=True)
class TokenDetail:
    """The token that is there, and the most likely ones."""

    chosen: Candidate
    top: tuple[Candidate, ...]
    offset: int  # characters of the choice's text before it: fewer than its tokens' spellings where some are hidden
    is_first: bool = False  # of an echoed prompt: nothing says how likely it was, and its logprob means nothing


class PromptDetails:
    """Feed it all PromptLogprobs of a prompt, in order."""

    def __init__(self, tokenizer: TextTokenizer, token_ids: Sequence[int], echo: str) -> None:
        """`echo`: the prompt as it is shown."""
        self._tokenizer = tokenizer
        self._token_ids = token_ids
        self._echo = echo
        self._detokenizer = detokenizer_for(tokenizer, ())
        self._num_tokens = 0  # that have their details
        self._num_characters = 0  # of the echo, before the next token

    def feed(self, logprobs: Sequence[PromptLogprobs]) -> Iterator[TokenDetail]:
        """Of the first token, too, when nothing was fed before."""
        if not self._num_tokens:
            yield self._next(0.0, (), is_first=True)
        for some in logprobs:
            shape = (len(some), some.num_top)
            of_tokens = np.frombuffer(some.logprobs, np.float32).tolist()
            ids = np.frombuffer(some.top_ids, np.int32).reshape(shape).tolist()
            of_ids = np.frombuffer(some.top_logprobs, np.float32).reshape(shape).tolist()
            for logprob, tops, values in zip(of_tokens, ids, of_ids, strict=True):
                candidates = (Candidate.of(self._tokenizer, *pair) for pair in zip(tops, values, strict=True))
                yield self._next(logprob, tuple(candidates))

    def _next(self, logprob: float, top: tuple[Candidate, ...], *, is_first: bool = False) -> TokenDetail:
        token_id = self._token_ids[self._num_tokens]
        self._num_tokens += 1
        chosen = Candidate.of(self._tokenizer, token_id, logprob)
        detail = TokenDetail(chosen, top, min(self._num_characters, len(self._echo)), is_first)
        text = self._detokenizer.feed((token_id,))
        if token_id in self._tokenizer.special_ids and self._echo.startswith(chosen.text, self._num_characters):
            text = chosen.text  # a text is echoed as it was written
        self._num_characters += len(text)
        return detail
