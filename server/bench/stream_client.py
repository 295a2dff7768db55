"""A client for many streamed completions at once on one event loop. Knows HTTP, no workload and no statistics.

Sockets are read by a protocol of our own, not by httpx: at 256 streams the client must never be what is measured
(benchmarks/serving_client.py says how many chunks a second it takes).
"""

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

import msgspec

from server.bench import outcome as why
from server.bench.completion_stream import CompletionStream, message_of_body
from server.bench.http_response import EventParser, MalformedResponseError, ResponseParser
from server.bench.outcome import Outcome
from server.bench.workload import Turn

CONNECT_TIMEOUT = 30.0
PATH = "/v1/completions"
#: What servers say to a field that they do not know, and to much else.
REFUSED = tuple(why.STATUS.format(status) for status in (400, 422))


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, and what they all carry."""

    base_url: str
    model: str
    api_key: str | None = None
    ignore_eos: bool = True
    temperature: float | None = 0.0  # None: the server's own
    timeout: float = 6 * 3600.0
    extra_body: dict[str, Any] = field(default_factory=dict)
    running_usage: bool = False  # ask for the usage so far in every chunk, which says how many tokens it has

    def body(self, turn: Turn, *, running_usage: bool = False) -> bytes:
        fields: dict[str, Any] = {
            "model": self.model,
            "prompt": turn.prompt,
            "max_tokens": turn.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True} | ({"continuous_usage_stats": True} if running_usage else {}),
        }
        if self.temperature is not None:
            fields["temperature"] = self.temperature
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return msgspec.json.encode(fields | self.extra_body)


def checked_url(base_url: str) -> SplitResult:
    """Raises ValueError for what is no address of a server."""
    url = urlsplit(base_url)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError(f"{base_url!r} is no http or https URL")
    if url.port == 0:  # asking for it raises where it is none
        raise ValueError(f"{base_url!r} has a port that no server can have")
    return url


class StreamClient:
    """Connections are kept and used again, as a long-lived client would. Close it when done."""

    def __init__(self, target: Target) -> None:
        self.target = target
        url = checked_url(target.base_url)
        self._host, self._ssl = url.hostname or "", ssl.create_default_context() if url.scheme == "https" else None
        self._port = url.port or (443 if self._ssl else 80)
        key = "" if target.api_key is None else f"authorization: Bearer {target.api_key}\r\n"
        path = url.path.rstrip("/").removesuffix("/v1") + PATH
        self._head = (
            f"POST {path} HTTP/1.1\r\nhost: {url.netloc.rpartition('@')[2]}\r\nuser-agent: longwave-bench\r\n"
            f"accept: text/event-stream\r\ncontent-type: application/json\r\n{key}content-length: "
        ).encode()
        self._idle: list[_Connection] = []
        # Who gives stream_options of their own has said what they want.
        self._running_usage = target.running_usage and "stream_options" not in target.extra_body
        self._running_usage_taken = False

    async def complete(self, turn: Turn, planned: float | None = None) -> Outcome:
        """Sends it now. Never raises: what goes wrong is in the outcome. `planned`: see Outcome.

        A server that refuses a request with `running_usage` is asked again without it, until it has once taken it.
        Latencies count from that second sending."""
        planned = time.perf_counter() if planned is None else planned
        asked = self._running_usage
        outcome = await self._ask(turn, planned, running_usage=asked)
        self._running_usage_taken |= asked and outcome.completed
        if not asked or self._running_usage_taken or outcome.failure not in REFUSED:
            return outcome
        again = await self._ask(turn, planned, running_usage=False)
        if again.completed:
            self._running_usage = False
        return again

    async def _ask(self, turn: Turn, planned: float, *, running_usage: bool) -> Outcome:
        body = self.target.body(turn, running_usage=running_usage)
        request = b"%b%d\r\n\r\n%b" % (self._head, len(body), body)
        outcome = Outcome(turn.prompt_tokens, planned)
        try:
            async with asyncio.timeout(self.target.timeout):
                return await self._complete(request, turn, outcome)
        except TimeoutError:
            return outcome.fail(why.TIMEOUT, f"{self.target.timeout:g} s")
        except (OSError, MalformedResponseError) as error:
            return outcome.fail(why.UNREACHABLE, f"{type(error).__name__}: {error}")

    def close(self) -> None:
        for connection in self._idle:
            connection.transport.close()
        self._idle.clear()

    async def _complete(self, request: bytes, turn: Turn, outcome: Outcome) -> Outcome:
        while True:
            reused = bool(self._idle)
            connection = self._idle.pop() if reused else await self._connect()
            if connection.closed:
                continue
            stream = CompletionStream(turn, outcome, exact_output=self.target.ignore_eos)
            outcome.sent = time.perf_counter()
            try:
                parser = await connection.exchange(request, stream)
            except ConnectionError:
                if reused:
                    continue  # the server had reset the connection before it read the request
                raise
            finally:
                if connection.idle:
                    self._idle.append(connection)
                else:
                    connection.transport.abort()
            if not parser.status and reused:
                continue  # or closed it
            return _judge(connection, parser, stream, outcome)

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._ssl)
        except TimeoutError:
            raise ConnectionError(f"no connection in {CONNECT_TIMEOUT:g} s") from None
        return connection


class _Connection(asyncio.Protocol):
    """One exchange after the other."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.closed = False
        self.other_body = b""  # of a reply that is no stream
        self._parser = ResponseParser()
        self._events = EventParser()
        self._stream: CompletionStream | None = None
        self._ended: asyncio.Future[None] | None = None

    @property
    def idle(self) -> bool:
        return not self.closed and self._stream is None and self._parser.keeps_alive

    async def exchange(self, request: bytes, stream: CompletionStream) -> ResponseParser:
        """Until the reply is complete or the connection ends. Raises MalformedResponseError."""
        self._parser, self._events, self._stream = ResponseParser(), EventParser(), stream
        self.other_body = b""
        self._ended = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        await self._ended
        self._stream = None
        return self._parser

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        parser, stream = self._parser, self._stream
        if stream is None or parser.complete:
            self.transport.abort()  # nobody asked: not to be used again
            return
        try:
            body = parser.feed(data)
            if parser.status == 200 and is_event_stream(parser):
                for event in self._events.feed(body):
                    stream.feed(event, now)
            else:
                self.other_body += body
        except MalformedResponseError as error:
            self._end(error)
            return
        if parser.complete:
            self._end(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._parser.end()
        self._end(None if self._parser.status or error is None else error)

    def _end(self, error: Exception | None) -> None:
        if self._ended is not None and not self._ended.done():
            if error is None:
                self._ended.set_result(None)
            else:
                self._ended.set_exception(error)


def is_event_stream(parser: ResponseParser) -> bool:
    return parser.headers.get("content-type", "").startswith("text/event-stream")


def _judge(connection: _Connection, parser: ResponseParser, stream: CompletionStream, outcome: Outcome) -> Outcome:
    if not parser.status:
        return outcome.fail(why.UNREACHABLE, "the connection ended before a reply")
    if parser.status != 200:
        return outcome.fail(why.STATUS.format(parser.status), message_of_body(connection.other_body))
    if not is_event_stream(parser):
        return outcome.fail(why.NOT_A_STREAM, parser.headers.get("content-type", "no content type"))
    return stream.finish()
