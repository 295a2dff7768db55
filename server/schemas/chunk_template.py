"""A chunk of a stream of which the text, and what was used so far, changes from one to the next: all else is written
once. Knows no endpoint."""

import secrets
from collections.abc import Callable

from pydantic_core import to_json

from server.schemas.usage import UsageInfo
from server.text.generation import Usage


class ChunkTemplate:
    def __init__(self, write: Callable[[str], str]) -> None:
        """`write`: the chunk with a text, as one JSON document that has the text once, as a value."""
        mark = secrets.token_hex(16)  # no caller can have put it anywhere else
        self._before, _, self._after = write(mark).partition(f'"{mark}"')
        self._up_to_usage, _, self._behind_usage = self._after.rpartition("null")

    def fill(self, text: str, usage: Usage | None = None) -> str:
        """`usage`: of a stream whose chunks end with one, or with null."""
        said = f"{self._before}{to_json(text).decode()}"
        if usage is None:
            return f"{said}{self._after}"
        return f"{said}{self._up_to_usage}{UsageInfo.of(usage).model_dump_json()}{self._behind_usage}"
