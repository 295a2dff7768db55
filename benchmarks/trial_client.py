"""Many requests at once from one event loop, each on a connection of its own, which may be left at any moment. Judges
no server."""

import asyncio
import json
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from benchmarks.fault_clients import CHAT
from benchmarks.fault_outcomes import OK, error_of
from benchmarks.trial_server import TrialServer

PATIENCE = 300.0  # seconds until an answer that has not come is given up
TEXT = re.compile(rb'"(?:content|text)": ?"[^"]')
REFUSED = (429, 503)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came on one connection. `status` None: nothing did. Moments are time.monotonic()'s."""

    status: int | None
    head: str
    body: bytes
    sent: float
    first: float | None  # when the first text came
    ended: float
    reached: bool = True  # there was a connection

    @property
    def ms(self) -> float:
        return 1e3 * (self.ended - self.sent)

    @property
    def first_ms(self) -> float | None:
        return None if self.first is None else 1e3 * (self.first - self.sent)

    @property
    def is_whole(self) -> bool:
        """A stream's [DONE], or a body with a reason to end."""
        return self.status == OK and (b"data: [DONE]" in self.body or b'"finish_reason":"' in self.body)

    @property
    def is_refusal(self) -> bool:
        """As a client should be refused for load: told when to come back, in OpenAI's shape."""
        told = re.search(r"^retry-after: [1-9]\d*\r?$", self.head, re.MULTILINE | re.IGNORECASE)
        return self.status in REFUSED and told is not None and self.has_error

    @property
    def has_error(self) -> bool:
        return error_of(self.content) is not None

    @property
    def content(self) -> bytes:
        """The body, whether it came in chunks or not."""
        return _unchunked(self.body)

    @property
    def is_clear(self) -> bool:
        """An answer, a refusal, or a stream that says that it was broken off."""
        return self.is_whole or self.is_refusal or (self.status == OK and self.has_error)


#: Whether a client leaves, asked whenever something came: with what has come, and whether that has text.
Leave = Callable[[bytes, bool], bool]


def chat(server: TrialServer, text: str, tokens: int, **more: Any) -> bytes:
    """A chat request whose answer has exactly so many tokens."""
    asked = {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, "ignore_eos": True}
    return json.dumps({"model": server.target.model, "temperature": 0} | asked | more).encode()


def request(path: str, body: bytes | None, key: str | None = None) -> bytes:
    method = "GET" if body is None else "POST"
    secret = "" if key is None else f"Authorization: Bearer {key}\r\n"
    kind = "" if body is None else f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{secret}{kind}Connection: close\r\n\r\n"
    return head.encode() + (body or b"")


async def ask(
    url: str, body: bytes | None, path: str = CHAT, leave: Leave | None = None, key: str | None = None
) -> Answer:
    """Never raises. Who leaves resets the connection; `leave` None: nobody does."""
    place = urlsplit(url)
    sent, first, came = time.monotonic(), None, bytearray()
    writer = None
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_connection(place.hostname, place.port)
            writer.write(request(path, body, key))
            while chunk := await reader.read(65536):
                came += chunk
                if first is None and TEXT.search(came):
                    first = time.monotonic()
                if leave is not None and leave(bytes(came), first is not None):
                    break
    ended = time.monotonic()
    if writer is not None:
        writer.transport.abort()
    head, _, rest = bytes(came).partition(b"\r\n\r\n")
    status = re.match(rb"HTTP/1\.1 (\d+)", head)
    number = int(status[1]) if status else None
    return Answer(number, head.decode("latin-1"), rest, sent, first, ended, reached=writer is not None)


async def open_loop(rate: float, seconds: float, send: Callable[[int], Awaitable[Answer]]) -> list[Answer]:
    """`rate` a second for so long, whatever the server does; then the answers of all."""
    begin = time.monotonic()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for number in range(int(rate * seconds)):
            if (wait := begin + number / rate - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            tasks.append(group.create_task(_sent(send, number)))
    return [task.result() for task in tasks]


async def closed_loop(clients: int, seconds: float, send: Callable[[int], Awaitable[Answer]]) -> list[Answer]:
    """So many clients that ask again when they have their answers, until the time is over."""
    end, answers = time.monotonic() + seconds, []

    async def client(number: int) -> None:
        while time.monotonic() < end:
            answers.append(await send(number))

    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(client(number))
    return answers


def sender(server: TrialServer, tokens: int) -> Callable[[int], Awaitable[Answer]]:
    """Of streams of so many tokens, no two of which ask the same."""

    async def send(_number: int) -> Answer:
        return await ask(server.url, chat(server, f"Say hello {secrets.token_hex(4)}.", tokens, stream=True))

    return send


async def capacity_of(server: TrialServer, clients: int, tokens: int, seconds: float) -> float:
    """Answers a second, when every seat is always taken (but for the last ones')."""
    answers = await closed_loop(clients, seconds, sender(server, tokens))
    first, last = min(answer.sent for answer in answers), max(answer.ended for answer in answers)
    return sum(answer.is_whole for answer in answers) / (last - first)


def rate_between(answers: Sequence[Answer], begin: float, end: float) -> float:
    """Whole answers a second that ended between two moments."""
    return sum(answer.is_whole and begin <= answer.ended < end for answer in answers) / (end - begin)


async def _sent(send: Callable[[int], Awaitable[Answer]], number: int) -> Answer:
    return await send(number)


def _unchunked(body: bytes) -> bytes:
    """Without the sizes of a chunked body, each on a line of its own."""
    return re.sub(rb"(^|\r\n)[0-9a-fA-F]+\r\n", b"", body) if re.match(rb"[0-9a-fA-F]+\r\n", body) else body
