"""What log-probabilities of prompts may take between the engine, which has them in seconds, and whoever spells them
out: bounded before anything is computed, for each request and for all together. Knows no engine and no text."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from server.equal_parts import EqualParts
from server.errors import InvalidRequest, ServerOverloaded

ONE_BYTES = 64 * 2**20  # 1.4 million tokens with 5 alternatives each
ALL_BYTES = 256 * 2**20
NUMBER_BYTES = 4  # of a log-probability, a rank, and a token id


class PromptMemory:
    """Counts what one event loop's requests may come to hold (no locks)."""

    def __init__(self) -> None:
        self._held = EqualParts(ALL_BYTES)

    @contextmanager
    def hold(self, prompts: Sequence[tuple[int, int]], tenant: bytes, param: str) -> Iterator[None]:
        """Room for prompts of so many tokens, with so many alternatives each. Raises InvalidRequest, about `param`,
        where no waiting helps, ServerOverloaded where it does."""
        num_tokens = sum(count for count, _ in prompts)
        num_bytes = NUMBER_BYTES * sum(count * (2 + 2 * num_top) for count, num_top in prompts)
        if num_bytes > ONE_BYTES:
            raise InvalidRequest(
                f"The log-probabilities of {num_tokens} tokens of prompts take {num_bytes / 2**20:.0f} MiB of memory; "
                f"at most {ONE_BYTES >> 20} MiB are served in one request. Ask for fewer prompts or alternatives.",
                param=param,
            )
        if not self._held.has_room(tenant, num_bytes):
            raise ServerOverloaded("Too many log-probabilities of prompts are asked for at once. Try again later.")
        self._held.hold(tenant, num_bytes)
        try:
            yield
        finally:
            self._held.hold(tenant, -num_bytes)
