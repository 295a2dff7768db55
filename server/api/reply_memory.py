"""What replies with log-probabilities hold until they go out whole: bounded, each and all together. Knows no endpoint.

When all is taken, a reply that holds less than an equal part still grows, so that long ones do not end short ones."""

from collections.abc import Iterator
from contextlib import contextmanager

from server.errors import InvalidRequest, ServerOverloaded

ONE_BYTES = 48 * 2**20  # 131,072 tokens with 20 alternatives each take some 30 MB
ALL_BYTES = 256 * 2**20


class ReplyMemory:
    """Counts what one event loop's replies hold (no locks)."""

    def __init__(self) -> None:
        self.num_held = 0
        self.replies: set[HeldReply] = set()  # that hold anything

    @contextmanager
    def reply(self) -> Iterator["HeldReply"]:
        """What it grows to counts until the end of the context."""
        held = HeldReply(self)
        try:
            yield held
        finally:
            self.replies.discard(held)
            self.num_held -= held.num_held


class HeldReply:
    def __init__(self, memory: ReplyMemory) -> None:
        self.num_held = 0
        self._memory = memory

    def grow(self, num_bytes: int, param: str = "logprobs") -> None:
        """Also by less than nothing. Raises InvalidRequest, about `param`, where no waiting helps, ServerOverloaded
        where it does."""
        self.num_held += num_bytes
        self._memory.num_held += num_bytes
        self._memory.replies.add(self)
        if self.num_held > ONE_BYTES:
            raise InvalidRequest(
                f"The answer's log-probabilities take more than {ONE_BYTES >> 20} MiB of memory, compressed: no reply "
                "that is not streamed may be longer. Ask with `stream` true (without `prompt_logprobs`), or for fewer "
                "tokens (those of prompts count), choices or alternatives.",
                param=param,
            )
        if self._memory.num_held > ALL_BYTES and self.num_held > ALL_BYTES // len(self._memory.replies):
            raise ServerOverloaded(
                "Too many long answers with log-probabilities are written at once. Try again later, or with `stream` "
                "true."
            )
