"""What one open request has received and its reader has not: bounded, whatever the reader does. Knows no sockets."""

import asyncio
from collections import deque
from typing import TypeVar

from server.engine.messages import TokenDelta
from server.errors import LongwaveError, RequestFailedError

MAX_EVENTS = 256  # then new deltas are merged into the last one
#: Tokens and logprobs entries: a reader that far behind is not reading. Those of prompts are packed, no more than the
#: prompt's length and far faster there than read: whoever asks for them has room for all.
MAX_BUFFERED = 65_536

T = TypeVar("T")


class TokenStream:
    """Deltas in order, for one reader. An error comes after the deltas that were received before it."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._deltas: deque[TokenDelta] = deque()
        self._buffered = 0
        self._error: LongwaveError | None = None
        self._wake = asyncio.Event()

    @property
    def num_events(self) -> int:
        return len(self._deltas)

    def put(self, delta: TokenDelta) -> None:
        if self._error is not None:
            return
        self._buffered += _weight(delta)
        if self._buffered > MAX_BUFFERED:
            self._deltas.clear()
            self.fail(RequestFailedError("The client did not read its answer fast enough."))
            return
        if len(self._deltas) >= MAX_EVENTS:
            delta = _merge(self._deltas.pop(), delta)
        self._deltas.append(delta)
        self._wake.set()

    def fail(self, error: LongwaveError) -> None:
        if self._error is None:
            self._error = error
        self._wake.set()

    async def get(self) -> TokenDelta:
        """The next delta. Raises the stream's error when there is none left."""
        while not self._deltas:
            if self._error is not None:
                raise self._error
            self._wake.clear()
            await self._wake.wait()
        delta = self._deltas.popleft()
        self._buffered -= _weight(delta)
        return delta


def _weight(delta: TokenDelta) -> int:
    return len(delta.token_ids) + sum(1 + entry.num_top for entry in delta.logprobs or ())


def _merge(first: TokenDelta, second: TokenDelta) -> TokenDelta:
    """One delta for both. The lists of `first` are this stream's own and grow in place."""
    first.token_ids.extend(second.token_ids)
    return TokenDelta(
        first.request_id,
        first.token_ids,
        _both(first.logprobs, second.logprobs),
        second.finish_reason,
        second.stop_token_id,
        second.num_cached_tokens,
        _both(first.prompt_logprobs, second.prompt_logprobs),
    )


def _both(first: list[T] | None, second: list[T] | None) -> list[T] | None:
    """Of one request: a delta of its prompt's scores alone has no tokens, and so no log-probabilities of any."""
    if first is None or second is None:
        return second if first is None else first
    first.extend(second)
    return first
