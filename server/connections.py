"""Clients' connections: HTTP/1.1 in which nobody takes too long, and no more of them than leave files to open for all
else. Must not know routes."""

import asyncio
import contextlib
import json
import logging
import resource
import secrets
import sys

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.asgi import LINGER_SECONDS
from server.errors import HeadersTooLarge, InvalidRequest, LongwaveError, ServerOverloaded

logger = logging.getLogger("longwave")

OWN_FILES = 128  # what this process opens that is no client's connection: databases, uploads, pipes, libraries
MOST_FILES = 65_536  # more than anybody's clients need
BACKLOG = 2048  # connections that wait to be accepted; uvicorn's default
HEADER_BYTES = 16 * 2**10  # of a request line and headers that have not wholly come
UNREAD_BYTES = 16 * 2**10  # of a reply, for whose client to read them the next ones wait; asyncio's default is 64 KiB
TURNS = 4  # of the event loop, from a connection that is accepted to its end when it is refused: asyncio's
TELL_SECONDS = 60.0  # between two lines in the log about one thing that lasts


def raise_file_limit() -> None:
    """To what the system lets this process ask for: many a shell and supervisor begins with 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connection_limits() -> tuple[int, int]:
    """How many may be open, and how many are accepted in one turn of the event loop.

    asyncio, out of files, writes a traceback for each connection that it may accept in that turn, again every second:
    so it must not come to that, and those of the last turns are not gone when the next ones come.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        files = sys.maxsize
    in_one_turn = min(BACKLOG, files // (4 * TURNS))
    return max(files - OWN_FILES - TURNS * in_one_turn, files // 4), in_one_turn


class ImpatientProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, but a connection is closed that takes too long to ask for something, or to read any of what
    is ready for it: its answer would hold a place among those that are served for as long as the client likes. One too
    many is refused at once."""

    most: int = sys.maxsize  # connections of this server
    header_timeout: float = 30.0
    read_timeout: float = 60.0
    _told: float = -TELL_SECONDS  # when the log last said that there are too many, on the loop's clock

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=UNREAD_BYTES)
        self.access_log = False  # uvicorn's would hold raw paths and queries; server.middleware writes ours
        self._asking: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None
        self._lingering: asyncio.TimerHandle | None = None  # a refused one: what still comes is thrown away
        if len(self.connections) > self.most:
            self._tell()
            self._refuse(ServerOverloaded("The server has too many open connections. Try again later."))
            self.transport.close()  # at once: it is files that are few
        else:
            self._expect_request()

    def data_received(self, data: bytes) -> None:
        if self._lingering is not None:
            return
        if self._asking is None and self._is_between_requests():
            self._expect_request()
        super().data_received(data)
        if not self._is_between_requests():
            self._request_came()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._was_read()
        self._expect_rest_to_be_read()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_rest_to_be_read()

    def connection_lost(self, exc: Exception | None) -> None:
        self._request_came()
        self._was_read()
        if self._lingering is not None:
            self._lingering.cancel()
        super().connection_lost(exc)

    @property
    def exchange(self) -> object | None:
        """Of a request that has come, and whose reply has not wholly left this process."""
        if self._lingering is not None:  # it was told why, and is not read any more
            return None
        unsent = self.transport.get_write_buffer_size() > 0
        return self.cycle if unsent or not self._is_between_requests() else None

    def _get_upgrade(self) -> bytes | None:
        """To nothing: RFC 9110, 7.8, lets a server go on in HTTP/1.1, where uvicorn would write two warnings."""
        return None

    def send_400_response(self, msg: str) -> None:
        """Called where h11's error is handled, which knows the status."""
        failure = sys.exception()
        if isinstance(failure, h11.RemoteProtocolError) and failure.error_status_hint == HeadersTooLarge.status:
            message = f"The request line and headers, or a chunk's header, are longer than {HEADER_BYTES} bytes."
            error: LongwaveError = HeadersTooLarge(message)
        else:
            error = InvalidRequest(msg)
        is_told = self._refuse(error)
        self._end_exchange()
        if is_told:
            self._linger()
        else:
            self.transport.close()

    def _refuse(self, error: LongwaveError) -> bool:
        """What came is no request, or too many have come: told as every failure is, and the last that is said.
        False in an answer that has begun: all that is left is to break it off."""
        body = json.dumps(error.body()).encode()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            "x-request-id": secrets.token_hex(16),
            **error.headers(),
        }
        reply = h11.Response(status_code=error.status, headers=list(headers.items()))
        try:
            for event in (reply, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            return False
        return True

    def _end_exchange(self) -> None:
        """Nothing more of an answer can be sent: whoever writes it is told, as of a client that has gone."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected, self.cycle.waiting_for_100_continue = True, False
            self.cycle.message_event.set()

    def _linger(self) -> None:
        """Closes once the client has, or soon: closing on unread bytes resets the connection, and the client may lose
        what it was told."""
        self._lingering = self.loop.call_later(LINGER_SECONDS, self.transport.close)
        self.flow.resume_reading()
        with contextlib.suppress(OSError):  # the client has gone
            self.transport.write_eof()

    def _tell(self) -> None:
        now = self.loop.time()
        if now - self._told >= TELL_SECONDS:
            type(self)._told = now
            logger.warning("%d connections are open, as many as there are files for: more are refused", self.most)

    def _is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect_request(self) -> None:
        self._asking = self.loop.call_later(self.header_timeout, self.transport.close)

    def _request_came(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    def _expect_reading(self, unread: int) -> None:
        """Of any part of these bytes: a long answer may take a client several times as long."""
        self._reading = self.loop.call_later(self.read_timeout, self._look_at_reading, unread)

    def _expect_rest_to_be_read(self) -> None:
        """Of a reply that is complete, and too short to pause who writes it: closing waits for it without end."""
        unread = self.transport.get_write_buffer_size()
        if unread and self._reading is None and self._is_between_requests():
            self._expect_reading(unread)

    def _look_at_reading(self, unread: int) -> None:
        still_unread = self.transport.get_write_buffer_size()
        if not still_unread:
            self._reading = None
        elif still_unread < unread:
            self._expect_reading(still_unread)
        else:
            self.transport.abort()

    def _was_read(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
