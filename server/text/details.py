"""What log-probabilities say of tokens, spelled out: of any token, and of a prompt's own from its first to its last.
Must not know the wire format or the engine's requests."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from models.batch import PromptLogprobs
from server.text.detokenizer import detokenizer_for
from server.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that is, or could be, at some place."""

    token_id: int
    text: str
    bytes: bytes
    logprob: float
    rank: int  # 1 = most likely

    @classmethod
    def of(cls, tokenizer: TextTokenizer, token_id: int, logprob: float, rank: int) -> "Candidate":
        spelled = tokenizer.token_bytes(token_id)
        return cls(token_id, spelled.decode("utf-8", errors="replace"), spelled, logprob, rank)

    @classmethod
    def likeliest(cls, tokenizer: TextTokenizer, pairs: Iterable[tuple[int, float]]) -> tuple["Candidate", ...]:
        """Of token ids and their log-probabilities, most likely first."""
        return tuple(cls.of(tokenizer, *pair, rank) for rank, pair in enumerate(pairs, 1))


@dataclass(frozen=True, slots=True)
class TokenDetail:
    """The token that is there, and the most likely ones."""

    chosen: Candidate
    top: tuple[Candidate, ...]
    offset: int  # characters of the choice's text before it: fewer than its tokens' spellings where some are hidden
    is_first: bool = False  # of a prompt: nothing says how likely it was, and its logprob and rank mean nothing

    def of_top(self, count: int) -> "TokenDetail":
        """With so many of the most likely ones, or fewer."""
        return self if len(self.top) <= count else replace(self, top=self.top[:count])


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
            yield self._next(0.0, 1, (), is_first=True)
        for some in logprobs:
            shape = (len(some), some.num_top)
            of_tokens = np.frombuffer(some.logprobs, np.float32).tolist()
            ranks = np.frombuffer(some.ranks, np.int32).tolist()
            ids = np.frombuffer(some.top_ids, np.int32).reshape(shape).tolist()
            of_ids = np.frombuffer(some.top_logprobs, np.float32).reshape(shape).tolist()
            for logprob, rank, tops, values in zip(of_tokens, ranks, ids, of_ids, strict=True):
                yield self._next(logprob, rank, Candidate.likeliest(self._tokenizer, zip(tops, values, strict=True)))

    def _next(self, logprob: float, rank: int, top: tuple[Candidate, ...], *, is_first: bool = False) -> TokenDetail:
        token_id = self._token_ids[self._num_tokens]
        self._num_tokens += 1
        chosen = Candidate.of(self._tokenizer, token_id, logprob, rank)
        is_special = token_id in self._tokenizer.special_ids
        begin = self._num_characters + self._detokenizer.num_held_before(None if is_special else token_id)
        if is_special and self._echo.startswith(chosen.text, begin):  # a text is echoed as it was written
            self._pass(self._detokenizer.finish() + chosen.text)
        else:
            self._pass(self._detokenizer.feed(token_id))
        return TokenDetail(chosen, top, min(begin, len(self._echo)), is_first)

    def _pass(self, text: str) -> None:
        """The echo goes on with `text`, perhaps behind a space that decoding leaves out: SentencePiece's first."""
        at = self._num_characters
        if text and not self._echo.startswith(text, at) and self._echo.startswith(f" {text}", at):
            at += 1
        self._num_characters = at + len(text)
