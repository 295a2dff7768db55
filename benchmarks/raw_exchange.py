"""One connection on which bytes are sent, whatever they are, and the replies that came back. Knows no request."""

import asyncio
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from benchmarks.fault_outcomes import error_of, is_openai_error

SILENCE = 0.25  # seconds without a byte until no more are waited for: what was sent asks for none, or has no end
CLOSES = 10.0  # seconds in which a server must have closed what its client has ended
#: What this server documents (docs/errors.md), of the requests that are sent here; 503 comes with Retry-After only.
STATUSES = frozenset({100, 200, 400, 401, 404, 405, 408, 413, 415, 429, 431, 503})
INSIDE = re.compile(rb"Traceback|site-packages|\.py\b|0x[0-9a-f]{8,}")  # what no client should read
_HEAD = re.compile(rb"HTTP/1\.1 (\d{3})[^\r\n]*\r\n(.*?\r\n)??\r\n", re.DOTALL)
_LENGTH = re.compile(rb"^content-length: (\d+)\r?$", re.MULTILINE)
_CHUNK = re.compile(rb"([0-9a-f]+)\r\n")


@dataclass(frozen=True, slots=True)
class RawReply:
    status: int
    head: bytes
    body: bytes

    @property
    def is_documented(self) -> bool:
        return self.status in STATUSES and (self.status != 503 or b"\r\nretry-after: " in b"\r\n" + self.head)

    @property
    def is_in_shape(self) -> bool:
        """An error is told in OpenAI's words; a reply to HEAD has a length and no body."""
        return self.status < 400 or not self.body or is_openai_error(error_of(self.body))

    @property
    def tells_of_the_inside(self) -> bool:
        return self.status >= 400 and INSIDE.search(self.body) is not None


async def exchange(port: int, parts: Sequence[bytes], silence: float = SILENCE) -> bytes | None:
    """All that came on one connection that sends `parts` one after the other, falls silent, and then ends. None: the
    server had not closed it CLOSES seconds later. A connection that the server reset has given what came before."""
    came = bytearray()
    writer = None
    try:
        async with asyncio.timeout(CLOSES + 60):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with suppress(ConnectionError):
                for part in parts:
                    writer.write(part)
                    with suppress(TimeoutError):  # a refused body is not read for ever
                        async with asyncio.timeout(CLOSES):
                            await writer.drain()
                    await asyncio.sleep(0)
                with suppress(TimeoutError):
                    while True:
                        async with asyncio.timeout(silence):
                            if not (chunk := await reader.read(65536)):
                                return bytes(came)
                        came += chunk
                writer.write_eof()
                async with asyncio.timeout(CLOSES):
                    came += await reader.read()
    except TimeoutError:
        return None
    finally:
        if writer is not None:
            writer.transport.abort()
    return bytes(came)


def replies(came: bytes) -> Iterator[RawReply]:
    """One after the other. Raises ValueError for what is no reply; the last one may have been cut short."""
    at = 0
    while at < len(came):
        head = _HEAD.match(came, at)
        if head is None:
            raise ValueError(f"no reply: {came[at : at + 80]!r}")
        at, lines = head.end(), (head[2] or b"").lower()
        length = _LENGTH.search(lines)
        if length is not None:
            end = at if came.startswith(b"HTTP/1.1 ", at) else at + int(length[1])  # of HEAD nothing follows
            body, at = came[at:end], end
        elif b"transfer-encoding: chunked" in lines:
            body, at = _unchunked(came, at)
        elif int(head[1]) == 100:
            body = b""
        else:  # of HTTP/1.0 and before: until the end
            body, at = came[at:], len(came)
        yield RawReply(int(head[1]), lines, body)


def _unchunked(came: bytes, at: int) -> tuple[bytes, int]:
    """A body, and where it ends."""
    body = bytearray()
    while at < len(came) and not came.startswith(b"HTTP/1.1 ", at):
        size = _CHUNK.match(came, at)
        if size is None:
            raise ValueError(f"no chunk: {came[at : at + 80]!r}")
        begin, count = size.end(), int(size[1], 16)
        body += came[begin : begin + count]
        at = begin + count + 2
        if not count:
            break
    return bytes(body), at
