"""One streamed completion, event by event, as an Outcome: counts tokens, finds failures. Knows no sockets, no HTTP."""

from typing import Any

import msgspec

from server.bench import outcome as why
from server.bench.outcome import Outcome
from server.bench.workload import Turn

DONE = b"[DONE]"
MAX_DETAIL = 300


class _Logprobs(msgspec.Struct):
    tokens: list[str] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"")


_decode = msgspec.json.Decoder(_Event).decode


class CompletionStream:
    """Feed it the data of each event and the moment it came; `finish` says what became of the request."""

    def __init__(self, turn: Turn, outcome: Outcome, *, exact_output: bool) -> None:
        self._turn = turn
        self._outcome = outcome
        self._exact_output = exact_output
        self._usage: _Usage | None = None
        self._told = True  # the server said how many tokens each chunk had
        self._counted = 0
        self._done = False
        self._finished = False
        self._empty_end: float | None = None  # when an end without text came

    def feed(self, data: bytes, now: float) -> None:
        if data == DONE:
            self._done = True
            return
        try:
            event = _decode(data)
        except msgspec.MsgspecError as error:
            self._fail(why.STREAM_ERROR, f"{error}: {data[:MAX_DETAIL]!r}")
            return
        if event.error and bytes(event.error) != b"null":
            self._fail(why.STREAM_ERROR, _message(bytes(event.error)))
        if event.usage is not None and event.usage.completion_tokens is not None:
            self._usage = event.usage
        if event.choices:
            choice = event.choices[0]
            count = self._count(choice, event.usage)
            if count:
                self._outcome.chunks.append((now, count))
                self._counted += count
            if choice.finish_reason is not None:
                self._finished = True
                self._empty_end = None if count else now

    def finish(self) -> Outcome:
        """The connection or the body has ended."""
        outcome, usage = self._outcome, self._usage
        # An answer that says that it is finished, and its usage, has ended well even where [DONE] is not written.
        if not self._done and not (self._finished and usage is not None):
            self._fail(why.BROKEN_OFF, "")
        elif usage is None:
            self._fail(why.NO_USAGE, "stream_options.include_usage was asked for")
        else:
            self._check(usage.prompt_tokens, usage.completion_tokens or 0)
        return outcome

    def _check(self, prompt_tokens: int, output_tokens: int) -> None:
        outcome, asked = self._outcome, self._turn.max_tokens
        outcome.output_tokens = output_tokens
        if self._empty_end is not None and self._counted == output_tokens - 1:
            outcome.chunks.append((self._empty_end, 1))  # the last token, whose text was empty
            self._counted += 1
        outcome.chunks_are_tokens = self._counted == output_tokens
        if not outcome.chunks:
            self._fail(why.NO_TOKENS, "")
        if prompt_tokens != self._turn.prompt_tokens:
            self._fail(why.PROMPT_MISMATCH, f"{prompt_tokens} instead of {self._turn.prompt_tokens}")
        if output_tokens > asked or (self._exact_output and output_tokens != asked):
            self._fail(why.OUTPUT_MISMATCH, f"{output_tokens} instead of {asked}")

    def _count(self, choice: _Choice, usage: _Usage | None) -> int:
        """Tokens of a chunk: as its token ids, its logprobs or a running usage say, else one a chunk. An end without
        text is no token here; `finish` knows better."""
        if choice.token_ids is not None:
            return len(choice.token_ids)
        if choice.logprobs is not None and choice.logprobs.tokens is not None:
            return len(choice.logprobs.tokens)
        if usage is not None and usage.completion_tokens is not None and self._told:
            return max(0, usage.completion_tokens - self._counted)
        self._told = False
        return 1 if choice.text or choice.finish_reason is None else 0

    def _fail(self, failure: str, detail: str) -> None:
        if self._outcome.failure is None:
            self._outcome.fail(failure, detail)


def _message(error: bytes) -> str:
    """Of OpenAI's error object, or of whatever stands in its place."""
    found: Any = msgspec.json.decode(error)
    text = found.get("message", found) if isinstance(found, dict) else found
    return str(text)[:MAX_DETAIL]


def message_of_body(body: bytes) -> str:
    """What a refused request was told."""
    try:
        found = msgspec.json.decode(body)
        return _message(msgspec.json.encode(found["error"] if isinstance(found, dict) and "error" in found else found))
    except msgspec.MsgspecError:
        return body[:MAX_DETAIL].decode(errors="replace")
