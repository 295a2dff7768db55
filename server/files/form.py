"""An upload's multipart body as it streams: the file's bytes go to a sink, the fields are checked. Knows no disk."""

from collections.abc import Callable
from dataclasses import dataclass

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from server.errors import InvalidRequest, UnsupportedParameter

PURPOSE = "fine-tune"
ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"
FIELDS = frozenset({"purpose", ANCHOR, SECONDS})
MIN_EXPIRY, MAX_EXPIRY = 3600, 2_592_000  # seconds; OpenAI's bounds: an hour, 30 days
MAX_FIELD_BYTES = 256
MAX_NAME_CHARACTERS = 255


@dataclass(frozen=True, slots=True)
class UploadFields:
    filename: str
    expires_in: int | None  # seconds after the upload


class UploadForm:
    """Feed it the body piece by piece, then `finish`. Raises InvalidRequest, and whatever the sink raises."""

    def __init__(self, content_type: str, sink: Callable[[bytes], None]) -> None:
        boundary = parse_options_header(content_type)[1].get(b"boundary")
        if not boundary:
            raise InvalidRequest("The Content-Type header names no multipart boundary.")
        self._sink = sink
        self._fields: dict[str, str] = {}
        self._filename: str | None = None
        self._ended = False
        self._piece = bytearray()  # the parser cuts at every carriage return; the sink gets it whole
        self._forget_part()
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._forget_part,
                    "on_header_field": self._on_header_name,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers,
                    "on_part_data": self._on_data,
                    "on_part_end": self._on_part_end,
                    "on_end": self._on_end,
                },
            )
        except FormParserError:
            raise InvalidRequest("The Content-Type header's multipart boundary is malformed.") from None

    def feed(self, data: bytes) -> None:
        try:
            self._parser.write(data)
        except FormParserError:
            raise InvalidRequest("We could not parse the multipart body of your request.") from None
        if self._piece:
            self._sink(bytes(self._piece))
            self._piece.clear()

    def finish(self) -> UploadFields:
        if not self._ended:
            raise InvalidRequest("The multipart body of your request ends before its closing boundary.")
        if self._filename is None:
            raise InvalidRequest("Missing required parameter: 'file'.", param="file")
        if "purpose" not in self._fields:
            raise InvalidRequest("Missing required parameter: 'purpose'.", param="purpose")
        for one, other in ((ANCHOR, SECONDS), (SECONDS, ANCHOR)):
            if one in self._fields and other not in self._fields:
                raise InvalidRequest(f"Missing required parameter: '{other}'.", param=other)
        seconds = self._fields.get(SECONDS)
        return UploadFields(self._filename, None if seconds is None else int(seconds))

    def _forget_part(self) -> None:
        self._header_name, self._header_value = b"", b""
        self._disposition = b""
        self._name = ""
        self._value = b""

    def _on_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name, self._header_value = b"", b""

    def _on_headers(self) -> None:
        kind, options = parse_options_header(self._disposition)
        if kind != b"form-data" or b"name" not in options:
            raise InvalidRequest("A part of the multipart body has no name.")
        self._name = options[b"name"].decode("utf-8", errors="replace")
        filename = options.get(b"filename")
        if self._name == "file":
            if self._filename is not None:
                raise InvalidRequest("One file per upload: 'file' is there twice.", param="file")
            if filename is None:
                raise InvalidRequest("'file' must be a file: its part has no filename.", param="file")
            self._filename = plain_name(filename)
            return
        shown = self._name[:MAX_FIELD_BYTES]
        if self._name not in FIELDS:
            raise InvalidRequest(f"Unrecognized request argument supplied: {shown}", param=shown)
        if self._name in self._fields:
            raise InvalidRequest(f"'{shown}' is there twice.", param=shown)

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self._piece += data[start:end]
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise InvalidRequest(f"'{self._name}' is longer than {MAX_FIELD_BYTES} bytes.", param=self._name)

    def _on_part_end(self) -> None:
        if self._name != "file":
            self._fields[self._name] = checked_field(self._name, self._value)

    def _on_end(self) -> None:
        self._ended = True


def checked_field(name: str, raw: bytes) -> str:
    value = raw.decode("utf-8", errors="replace")
    if name == "purpose" and value != PURPOSE:
        raise UnsupportedParameter(
            f"The purpose {value!r} is not served: files are taken for '{PURPOSE}' only.", param="purpose"
        )
    if name == ANCHOR and value != "created_at":
        raise InvalidRequest(f"Invalid value for '{ANCHOR}': {value!r} is not 'created_at'.", param=ANCHOR)
    if name == SECONDS and not (value.isascii() and value.isdigit() and MIN_EXPIRY <= int(value) <= MAX_EXPIRY):
        raise InvalidRequest(
            f"Invalid value for '{SECONDS}': {value!r} is not a whole number from {MIN_EXPIRY} to {MAX_EXPIRY}.",
            param=SECONDS,
        )
    return value


def plain_name(raw: bytes) -> str:
    """The client's name of the file without its folders: something to show, never a path on this machine."""
    try:
        name = raw.decode("utf-8").replace("\\", "/").rpartition("/")[2]
    except UnicodeDecodeError:
        raise InvalidRequest("The filename is not UTF-8.", param="file") from None
    if name in ("", ".", ".."):
        raise InvalidRequest("The filename is empty.", param="file")
    if not name.isprintable():
        raise InvalidRequest("The filename has characters that cannot be printed.", param="file")
    if len(name) > MAX_NAME_CHARACTERS:
        raise InvalidRequest(f"The filename has more than {MAX_NAME_CHARACTERS} characters.", param="file")
    return name
