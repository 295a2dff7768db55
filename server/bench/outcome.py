"""What became of one request: the moments at which its tokens came, or why it failed. Plain data."""

from dataclasses import dataclass, field

#: Why a request counts as failed; the names appear in reports.
UNREACHABLE = "could not connect"
STATUS = "the server replied {}"
BROKEN_OFF = "the stream ended without [DONE]"
NO_USAGE = "the stream has no usage"
NO_TOKENS = "no token came"
PROMPT_MISMATCH = "the server counted another prompt length"
OUTPUT_MISMATCH = "the answer has another length"
STREAM_ERROR = "an error came in the stream"
NOT_A_STREAM = "the reply is not server-sent events"
TIMEOUT = "it took longer than the limit"
TURN_BEFORE = "the turn before it failed"


@dataclass(slots=True)
class Outcome:
    """Moments are time.perf_counter() seconds. `chunks`: when a piece of the answer came, and its number of tokens."""

    prompt_tokens: int
    planned: float  # when it was to be sent
    sent: float = 0.0
    chunks: list[tuple[float, int]] = field(default_factory=list)
    output_tokens: int = 0
    chunks_are_tokens: bool = True  # false: the server did not say how many tokens a chunk had, and they do not add up
    failure: str | None = None
    detail: str = ""

    @property
    def completed(self) -> bool:
        return self.failure is None

    @property
    def ended(self) -> float:
        return self.chunks[-1][0] if self.chunks else self.sent

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first token."""
        return self.chunks[0][0] - self.sent

    @property
    def e2el(self) -> float:
        """Seconds from sending to the last token."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first: (E2EL - TTFT) / (tokens - 1). None of an answer of one token."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itls(self) -> list[float]:
        """Seconds between tokens. A chunk of n tokens counts as n equal gaps."""
        gaps = []
        for (before, _), (now, count) in zip(self.chunks, self.chunks[1:], strict=False):
            gaps += [(now - before) / count] * count
        return gaps

    def fail(self, failure: str, detail: str = "") -> "Outcome":
        self.failure, self.detail = failure, detail
        return self
