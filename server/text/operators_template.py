"""What an operator says of the chat template: another one in the place of the model's, and values for its variables.
Must not know messages, tokens or any model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_BYTES = 2**20


class TemplateFileError(Exception):
    """Why a file is no chat template: a sentence that goes on from "chat-template: "."""


@dataclass(frozen=True, slots=True)
class OperatorsTemplate:
    source: str | None = None  # None: the model's own
    variables: Mapping[str, Any] = field(default_factory=dict)  # what a request says itself comes before them


NOTHING_SAID = OperatorsTemplate()


def read_template(path: Path) -> str:
    """Raises TemplateFileError for a file that cannot be read, and for what can be no chat template of any model."""
    from server.text.limited_templates import TemplateSourceError, check_source

    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TemplateFileError(
            f"{str(path)!r:.300} cannot be read: {reason} (a file is named here, the template is not written out)"
        ) from error
    if len(content) > MAX_BYTES:
        raise TemplateFileError(f"{path} has more than {MAX_BYTES} bytes")
    try:
        source = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TemplateFileError(f"{path} is not UTF-8: byte {error.start + 1}") from error
    if not source.strip():
        raise TemplateFileError(f"{path} is empty")
    try:
        check_source(source)
    except TemplateSourceError as error:
        raise TemplateFileError(f"{path} is no template: {error}") from error
    return source
