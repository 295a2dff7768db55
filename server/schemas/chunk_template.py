"""A chunk of a stream of which the text alone changes from one to the next: all else is written once. Knows no
endpoint."""

import secrets
from collections.abc import Callable

from pydantic_core import to_json


class ChunkTemplate:
    def __init__(self, write: Callable[[str], str]) -> None:
        """`write`: the chunk with a text, as one JSON document that has the text once, as a value."""
        mark = secrets.token_hex(16)  # no caller can have put it anywhere else
        self._before, _, self._after = write(mark).partition(f'"{mark}"')

    def fill(self, text: str) -> str:
        return f"{self._before}{to_json(text).decode()}{self._after}"
