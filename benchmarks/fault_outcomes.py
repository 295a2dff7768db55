"""What became of a fault: one of five outcomes, and whether it was told in OpenAI's words. Sends nothing."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

OK = 200
PATIENCE = 30.0  # seconds until an answer that has not come is a hang
INVALID = frozenset({400, 413, 422})  # statuses of a body that is refused
ERROR_KEYS = {"message", "type", "param", "code"}


class Outcome(StrEnum):
    RIGHT = "right"
    WRONG = "wrong answer"
    SERVER_ERROR = "5xx"
    HANG = "hang"
    GONE = "server gone"


@dataclass(frozen=True, slots=True)
class Expected:
    """What is right: one of these refusals (empty: none), or an answer within so many milliseconds, or either."""

    refusals: frozenset[int] = INVALID
    answer: bool = False
    within_ms: float = float("inf")
    exit_codes: frozenset[int] | None = None  # of a process that was told to end, after its answer

    def __str__(self) -> str:
        said = [" or ".join(map(str, sorted(self.refusals)))] if self.refusals else []
        if self.answer:
            said.append("an answer" if self.within_ms == float("inf") else f"an answer in {self.within_ms:.0f} ms")
        if self.exit_codes is not None:
            said[-1] += ", then an exit with " + " or ".join(map(str, sorted(self.exit_codes)))
        return " or ".join(said)


@dataclass(frozen=True, slots=True)
class Reply:
    """What a client saw. `status` is None where nothing came; `timed_out` also where it never ended."""

    status: int | None
    body: bytes
    ms: float
    timed_out: bool = False
    exit_code: int | None = None


def events(body: bytes) -> list[Any]:
    """The data of a stream of server-sent events, "[DONE]" as the text that it is; what is no JSON becomes a text."""
    data = (line.removeprefix(b"data:").strip() for line in body.splitlines() if line.startswith(b"data:"))
    return [parsed(one) for one in data]


def parsed(text: bytes) -> Any:
    """JSON, or the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text.decode(errors="replace")


def error_of(body: bytes) -> Any:
    """What a body or the events of a stream give as the error: OpenAI's object or anything else; None without one."""
    found = [parsed(body), *events(body)]
    errors = [one.get("error", one.get("detail")) for one in found if isinstance(one, Mapping)]
    told = [error for error in errors if error is not None]
    broken = [one for one in found[1:] if isinstance(one, str) and one.startswith('{"error"')]
    return (told + broken)[0] if told or broken else None


def is_openai_error(error: Any) -> bool:
    return (
        isinstance(error, Mapping)
        and error.keys() >= ERROR_KEYS
        and isinstance(error["message"], str)
        and bool(error["message"])
        and isinstance(error["type"], str)
    )


def is_answer(body: bytes) -> bool:
    """A whole chat completion, or a stream of chunks that was finished."""
    stream = events(body)
    chunks = stream or [parsed(body)]
    choices = [choice for one in chunks if isinstance(one, Mapping) for choice in one.get("choices") or ()]
    if not choices or error_of(body) is not None:
        return False
    return any(choice.get("finish_reason") for choice in choices)


def classify(reply: Reply, expected: Expected, answers_after: float | None) -> Outcome:
    """The worst that is true of it. `answers_after`: seconds until a good request got its answer afterwards; None if
    none did."""
    if answers_after is None:
        return Outcome.GONE
    if reply.timed_out or answers_after > PATIENCE:
        return Outcome.HANG
    if reply.status is not None and reply.status >= 500:
        return Outcome.SERVER_ERROR
    return Outcome.RIGHT if _is_right(reply, expected) else Outcome.WRONG


def _is_right(reply: Reply, expected: Expected) -> bool:
    if reply.status != OK:
        return reply.status in expected.refusals
    if error_of(reply.body) is not None:  # a stream that had begun
        return bool(expected.refusals)
    ended = expected.exit_codes is None or reply.exit_code in expected.exit_codes
    return expected.answer and is_answer(reply.body) and reply.ms <= expected.within_ms and ended


def in_openai_shape(reply: Reply) -> bool:
    """An answer, or an error as OpenAI's: its object of four keys, and 400 rather than 422."""
    if reply.status == OK and error_of(reply.body) is None:
        return is_answer(reply.body)
    return reply.status != 422 and is_openai_error(error_of(reply.body))


def names(reply: Reply, param: str) -> bool:
    """Whether the error tells a person which field it is about, as a word of its own."""
    error = error_of(reply.body)
    text = json.dumps(error) if isinstance(error, Mapping | list) else str(error)
    return re.search(rf"(?<!\w){re.escape(param)}(?!\w)", text) is not None
