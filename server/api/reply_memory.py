"""What replies that go out whole hold until their clients have read them, those with log-probabilities from their first
token on: bounded, each and all together. Knows no endpoint.

When all is taken, a reply that holds less than an equal part still grows, so that long ones do not end short ones."""

from collections.abc import Iterator
from contextlib import contextmanager

from server.errors import InvalidRequest, ServerOverloaded

ONE_BYTES = 48 * 2**20  # 131,072 tokens with 20 alternatives each take some 30 MB
ALL_BYTES = 256 * 2**20
WRITTEN_BYTES = 128 * 2**20  # of one, as it goes out
SMALL_BYTES = 64 * 2**10  # of one that always has room


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
        self._num_written = 0
        self._memory = memory

    def write(self, num_bytes: int, param: str | None = None) -> None:
        """So many more that are as they will go out, beside what it has grown to. Raises as `grow`."""
        before = self._num_written if self._num_written > SMALL_BYTES else 0
        self._num_written += num_bytes
        if self._num_written > WRITTEN_BYTES:
            raise InvalidRequest(
                f"The reply would have more than {WRITTEN_BYTES >> 20} MiB: ask for less at once, or completions with "
                "`stream` true.",
                param=param,
            )
        if self._num_written > SMALL_BYTES:
            self._hold(self._num_written - before)
            self._check_all("Too many long replies are not read yet. Try again later.")

    def grow(self, num_bytes: int, param: str = "logprobs") -> None:
        """Also by less than nothing. Raises InvalidRequest, about `param`, where no waiting helps, ServerOverloaded
        where it does."""
        self._hold(num_bytes)
        if self.num_held > ONE_BYTES:
            raise InvalidRequest(
                f"The answer's log-probabilities take more than {ONE_BYTES >> 20} MiB of memory, compressed: no reply "
                "that is not streamed may be longer. Ask with `stream` true (without `prompt_logprobs`), or for fewer "
                "tokens (those of prompts count), choices or alternatives.",
                param=param,
            )
        self._check_all(
            "Too many long answers with log-probabilities are written at once. Try again later, or with `stream` true."
        )

    def _hold(self, num_bytes: int) -> None:
        self.num_held += num_bytes
        self._memory.num_held += num_bytes
        self._memory.replies.add(self)

    def _check_all(self, message: str) -> None:
        if self._memory.num_held > ALL_BYTES and self.num_held > ALL_BYTES // len(self._memory.replies):
            raise ServerOverloaded(message)


memory = ReplyMemory()  # of this process
