"""One choice of an answer: the engine's tokens -> text, cut at stop strings, with their logprobs spelled out.
Must not know the wire format, the other choices or the engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from models.batch import TokenLogprobs
from server.engine.messages import TokenDelta
from server.errors import RequestFailedError
from server.text.details import Candidate, TokenDetail
from server.text.detokenizer import detokenizer_for
from server.text.stop import StopMatcher
from server.text.tokenizer import TextTokenizer

TextFinish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class TextDelta:
    index: int
    text: str
    details: tuple[TokenDetail, ...] = ()  # only when logprobs were asked for
    finish_reason: TextFinish | None = None
    prompt_details: tuple[TokenDetail, ...] = ()  # of the prompt's next tokens, where they are told apart

    @property
    def num_logprobs(self) -> int:
        """Those of alternatives included."""
        return sum(1 + len(detail.top) for detail in self.details + self.prompt_details)


class ChoiceText:
    """Feed it every TokenDelta of one engine request, in order, until a result carries a finish_reason."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        index: int,
        *,
        prompt_token_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        echo: str = "",
        follows_details: bool = False,
        prompt_only: bool = False,
    ) -> None:
        """`echo`: what is shown in front of the text, by others. `follows_details`: so are the details of its tokens.
        `prompt_only`: what is generated is neither shown nor counted."""
        self.index = index
        self.num_tokens = 0
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer_for(tokenizer, prompt_token_ids)
        self._stop = StopMatcher(stop) if stop else None
        self._min_tokens = min_tokens
        self._follows_details = follows_details
        self._prompt_only = prompt_only
        self._num_echoed = len(echo)
        self._num_characters = 0  # whole ones, of the tokens so far, also those that may begin a stop string

    def feed(self, delta: TokenDelta) -> TextDelta:
        if delta.finish_reason in ("abort", "error"):
            raise RequestFailedError("The engine gave this request up.")
        if self._prompt_only:
            return TextDelta(self.index, "", finish_reason=None if delta.finish_reason is None else "length")
        num_texts = len(delta.token_ids) - (delta.stop_token_id is not None)
        pieces: list[str] = []
        details: list[TokenDetail] = []
        for at, token_id in enumerate(delta.token_ids):
            self.num_tokens += 1
            is_text = at < num_texts
            # Behind an echoed prompt's, every token has its log-probability: callers count from the end.
            if delta.logprobs is not None and (is_text or self._follows_details):
                details.append(self._detail(token_id, delta.logprobs[at], is_text=is_text))
            if not is_text:  # the token that stopped it: counted, never shown
                break
            text, stopped = self._text_of(token_id)
            pieces.append(text)
            if stopped:
                return TextDelta(self.index, "".join(pieces), tuple(details), "stop")
        if delta.finish_reason is None:
            return TextDelta(self.index, "".join(pieces), tuple(details))
        rest, stopped = self._finish()
        reason: TextFinish = "stop" if stopped or delta.finish_reason == "stop" else "length"
        return TextDelta(self.index, "".join(pieces) + rest, tuple(details), reason)

    def _text_of(self, token_id: int) -> tuple[str, bool]:
        text = self._detokenizer.feed(token_id)
        self._num_characters += len(text)
        if self._stop is None:
            return text, False
        # As in vLLM: a stop string counts that ends after min_tokens, wherever it begins.
        may_stop = self.num_tokens > self._min_tokens
        result = self._stop.feed(text, may_stop=may_stop)
        held = self._detokenizer.held() if may_stop and result.stopped is None else ""
        if held:
            last = self._stop.feed_if_it_stops(held)
            return result.text + last.text, last.stopped is not None
        return result.text, result.stopped is not None

    def _finish(self) -> tuple[str, bool]:
        rest = self._detokenizer.finish()
        if self._stop is None:
            return rest, False
        result = self._stop.feed(rest)
        return (result.text, True) if result.stopped else (result.text + self._stop.finish(), False)

    def _detail(self, token_id: int, logprobs: TokenLogprobs, *, is_text: bool) -> TokenDetail:
        top = Candidate.likeliest(self._tokenizer, logprobs.top)
        chosen = Candidate.of(self._tokenizer, token_id, logprobs.logprob, logprobs.rank)
        before = self._num_characters + self._detokenizer.num_held_before(token_id if is_text else None)
        return TokenDetail(chosen, top, self._num_echoed + before)
