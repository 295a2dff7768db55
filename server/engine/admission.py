"""The API process's door: how many requests may be open at once, and which prompts can ever fit. Must not know
tokens' texts, queues or blocks: a refusal here costs nothing that was worth having."""

from collections.abc import Iterator
from contextlib import contextmanager

from server.engine.config import EngineConfig
from server.engine.messages import EngineReady
from server.equal_parts import EqualParts
from server.errors import ContextLengthExceeded, InvalidRequest, ServerOverloaded


class Admission:
    """Counts open requests of one event loop (no locks) and knows the length that the engine serves."""

    def __init__(self, max_requests: int, max_model_len: int | None = None) -> None:
        self.max_requests = max_requests
        self.max_model_len = max_model_len
        self._open = EqualParts(max_requests)  # of tenants: those who have a key of their own

    @classmethod
    def of(cls, config: EngineConfig) -> "Admission":
        """Room for what runs and for what may wait."""
        return cls(config.max_num_seqs + config.max_queued_requests, config.max_model_len)

    @property
    def num_requests(self) -> int:
        return self._open.held

    def learn(self, ready: EngineReady) -> None:
        """The engine knows the served length only once model and KV cache are there."""
        self.max_model_len = ready.max_model_len

    def check(self, num_prompt_tokens: int, max_tokens: int | None) -> None:
        """Raises ContextLengthExceeded for a request that no waiting would make possible."""
        limit = self.max_model_len
        if limit is None:
            return
        asked = num_prompt_tokens + (1 if max_tokens is None else max_tokens)
        if asked <= limit:
            return
        detail = "" if max_tokens is None else f" ({num_prompt_tokens} in the prompt, {max_tokens} in the completion)"
        total = num_prompt_tokens if max_tokens is None else asked
        room = "" if max_tokens is not None else ", of which at least one is for the completion"
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens{room}. However, you requested {total} tokens"
            f"{detail}. Please reduce the length of the prompt or of the completion.",
            param="max_tokens" if num_prompt_tokens < limit else "messages",
        )

    def check_at_least(self, num_prompt_tokens: int) -> None:
        """Raises ContextLengthExceeded for a prompt of so many tokens or more, which nobody has counted."""
        if self.max_model_len is not None and num_prompt_tokens >= self.max_model_len:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self.max_model_len} tokens, of which at least one is for the "
                f"completion. However, your prompt has at least {num_prompt_tokens} tokens. Please reduce its length."
            )

    @contextmanager
    def reserve(self, num_sequences: int = 1, tenant: bytes = b"") -> Iterator[None]:
        """Taken before tokenising, held until the answer is complete. Raises ServerOverloaded at once when full, and
        InvalidRequest for more sequences than there is ever room for."""
        if num_sequences > self.max_requests:
            raise InvalidRequest(
                f"The request asks for {num_sequences} choices (prompts times n); at most {self.max_requests} are "
                "served at once.",
                param="n",
            )
        if not self._open.has_room(tenant, num_sequences):
            raise ServerOverloaded(f"The server is full: {self.num_requests} requests are open. Try again later.")
        self._open.hold(tenant, num_sequences)
        try:
            yield
        finally:
            self._open.hold(tenant, -num_sequences)
