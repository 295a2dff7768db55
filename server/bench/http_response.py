"""An HTTP/1.1 response and its server-sent events, parsed as bytes arrive. Knows no sockets and no JSON.

Written for speed: one call a packet, whatever events it holds. RFC 9112 as far as replies to a POST need it.
"""

from collections.abc import Iterator

MAX_HEAD = 65_536
MAX_LINE = 1 << 20  # an event of a stream


class MalformedResponseError(Exception):
    """What came is not HTTP/1.1."""


class ResponseParser:
    """Feed it bytes; it hands the body on, decoded from its transfer coding."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = False
        self._head = bytearray()
        self._chunked = False
        self._left: int | None = 0  # bytes of the body or of this chunk; None: until the connection ends
        self._line = bytearray()
        self._in_trailer = False

    @property
    def keeps_alive(self) -> bool:
        return self.complete and self.headers.get("connection", "").lower() != "close"

    def feed(self, data: bytes) -> bytes:
        """The next bytes of the body. Raises MalformedResponseError."""
        if not self.status:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                if len(self._head) > MAX_HEAD:
                    raise MalformedResponseError("the head is too long")
                return b""
            data = bytes(self._head[end + 4 :])
            self._read_head(bytes(self._head[:end]))
            if not self.status:  # 1xx: the real one follows
                self._head.clear()
                return self.feed(data)
        if self._chunked:
            return self._decode_chunks(data)
        if self._left is None:
            return data
        body = data[: self._left]
        self._left -= len(body)
        self.complete = self._left == 0
        return body

    def end(self) -> None:
        """The connection has ended: so has a body without a length of its own."""
        if self.status and not self._chunked and self._left is None:
            self.complete = True

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise MalformedResponseError(f"{first[:80]!r} is no status line")
        status = int(rest[:3])
        if status < 200:
            return
        self.status = status
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        length = self.headers.get("content-length")
        self._chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        if self._chunked:
            self._left = 0
        elif length is None:
            self._left = 0 if status in (204, 304) else None
            if version == "HTTP/1.0" or self._left is None:
                self.headers["connection"] = "close"
        elif length.isdigit():
            self._left = int(length)
        else:
            raise MalformedResponseError(f"{length[:80]!r} is no length")
        self.complete = self._left == 0 and not self._chunked

    def _decode_chunks(self, data: bytes) -> bytes:
        body = []
        at = 0
        while at < len(data) and not self.complete:
            if self._left:
                piece = data[at : at + self._left]
                body.append(piece)
                self._left -= len(piece)
                at += len(piece)
                continue
            end = data.find(b"\n", at)
            if end < 0:
                self._line += data[at:]
                break
            line = (bytes(self._line) + data[at:end]).strip()
            self._line.clear()
            at = end + 1
            self._read_size(line)
        return body[0] if len(body) == 1 else b"".join(body)

    def _read_size(self, line: bytes) -> None:
        """A chunk's size, the empty line after a chunk, or a line of the trailer."""
        if self._in_trailer:
            self.complete = not line
        elif line:
            try:
                self._left = int(line.partition(b";")[0], 16)
            except ValueError:
                raise MalformedResponseError(f"{line[:80]!r} is no size of a chunk") from None
            self._in_trailer = self._left == 0


class EventParser:
    """Bytes of a stream -> the data of its events. One line of data an event, as OpenAI's servers write them."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE:
            raise MalformedResponseError("an event is too long")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
