"""A generation -> one JSON reply or server-sent events, ended in every case: complete, failed, client gone.
Must not know which endpoint's format it writes.

Headers go out at once, and `:` lines where it is long silent: some clients read none. The first chunk comes with the
first text, as it is taken for the first token. `[DONE]` is only ever written after success. A client that stops reading
is cut off: its place among the open requests is another's.
"""

import json
import logging
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import ExitStack, aclosing, closing, nullcontext
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.disconnect import ClientDisconnected, until_disconnect
from server.api.piecewise import PiecewiseJSON
from server.api.reply_memory import HeldReply, memory
from server.errors import LongwaveError, RequestFailedError
from server.patience import Patience
from server.schemas.packed_json import PackedJSON
from server.schemas.usage import IncludeUsage
from server.schemas.whole_choice import WholeChoice
from server.text.choice import TextDelta
from server.text.generation import Generation, Usage

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]
#: For the `responses` of a route that streams when it is asked to.
EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
PING = b":\n\n"
DONE = b"data: [DONE]\n\n"
#: In a JSON document they are inside of strings. To Python's splitlines, by which clients read lines, they end one.
_LINE_ENDS = {"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
STALL_LIMIT = 60.0  # seconds that a client may take to read what fills its connection's buffers
FEW_LOGPROBS = 4  # tokens: so many are written in 1 or 2 ms
LOGPROBS_AT_ONCE = 64  # tokens, with all their alternatives: written in a few milliseconds
LONG_REPLY = 2**18  # characters: written in a few milliseconds

logger = logging.getLogger("longwave")


class Reply(Protocol):
    """How an endpoint writes what was generated; every string is one JSON document, and the pieces of `whole` are."""

    @property
    def include_usage(self) -> IncludeUsage: ...
    def opening(self, index: int, usage: Usage | None) -> Iterable[str]: ...
    def chunks(self, delta: TextDelta, usage: Usage | None) -> Iterable[str]: ...
    def closing(self, usage: Usage) -> Iterable[str]: ...
    def whole_choice(self, index: int) -> WholeChoice: ...
    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> Iterable[bytes | PackedJSON]: ...


def answer(request: Request, generation: Generation, reply: Reply, *, stream: bool, ping_interval: float) -> Response:
    """Generates only when it is sent: by then nobody holds the request any more, whose body may be large."""
    if stream:
        return EventStream(generation, reply, ping_interval, request.state.request_id)
    return WholeReply(generation, reply)


class WholeReply(Response):
    def __init__(self, generation: Generation, reply: Reply) -> None:
        super().__init__()
        self.generation = generation
        self.reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as stack:
            held = stack.enter_context(memory.reply())
            try:
                pieces = await until_disconnect(receive, _collect(self.generation, self.reply, held))
            finally:
                await self.generation.aclose()
            whole = PiecewiseJSON(pieces, stack.pop_all())
        await whole(scope, receive, send)


class EventStream(Response):
    def __init__(self, generation: Generation, reply: Reply, ping_interval: float, request_id: str) -> None:
        self.generation = generation
        self.request_id = request_id
        self.reply = reply
        self.ping_interval = ping_interval
        self.status_code = 200
        self.background = None
        self.raw_headers = list(HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        try:
            await until_disconnect(receive, self._write(send))
        except ClientDisconnected:
            pass
        except TimeoutError:
            logger.warning("a client stopped reading: its answer is cut")
        finally:
            await self.generation.aclose()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        with closing(Patience()) as patience:
            events = _events(self.generation, self.reply, self.ping_interval, self.request_id)
            async with aclosing(events):
                async for event in events:
                    with patience.limit(STALL_LIMIT):
                        await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _events(
    generation: Generation, reply: Reply, ping_interval: float, request_id: str
) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(_chunks(generation, reply, ping_interval)) as chunks:
            async for chunk in chunks:
                yield PING if chunk is None else _event(chunk)
    except LongwaveError as error:
        yield _event(json.dumps(error.body()))
    except Exception:
        logger.exception("request %s failed in the midst of its answer", request_id)
        yield _event(json.dumps(RequestFailedError(f"The server failed. Request id: {request_id}").body()))
    else:
        yield DONE


async def _chunks(generation: Generation, reply: Reply, ping_interval: float) -> AsyncGenerator[str | None, None]:
    """None: nothing came for as long as nobody is to be left in doubt. A choice's opening is right before what it says
    first."""
    opened: set[int] = set()
    spoke = time.monotonic()
    while True:
        try:
            delta = await generation.next(timeout=max(0.0, spoke + ping_interval - time.monotonic()))
        except TimeoutError:
            yield None
            spoke = time.monotonic()
            continue
        if delta is None:
            break
        usage = generation.usage if reply.include_usage == "continuous" else None
        chunks = reply.chunks(delta, usage)
        if len(delta.details) > FEW_LOGPROBS:
            async with generation.long_work.piece():
                chunks = list(chunks)
        for chunk in chunks:
            if delta.index not in opened:
                opened.add(delta.index)
                for first in reply.opening(delta.index, usage):
                    yield first
            yield chunk
            spoke = time.monotonic()
    for chunk in reply.closing(generation.usage):
        yield chunk


async def _collect(generation: Generation, reply: Reply, held: HeldReply) -> Sequence[bytes | PackedJSON]:
    """Raises what `generation` fails with, and what `held` may not hold."""
    choices = [reply.whole_choice(index) for index in range(len(generation.requests))]
    while (delta := await generation.next()) is not None:
        choice = choices[delta.index]
        choice.add_text(delta)
        for param, details, add in (
            ("prompt_logprobs", delta.prompt_details, choice.add_prompt_logprobs),
            ("logprobs", delta.details, choice.add_logprobs),
        ):
            for at in range(0, len(details), LOGPROBS_AT_ONCE):
                before, some = choice.num_held, details[at : at + LOGPROBS_AT_ONCE]
                async with generation.long_work.piece() if len(some) > FEW_LOGPROBS else nullcontext():
                    add(some)
                try:
                    held.grow(choice.num_held - before, param)
                except LongwaveError as error:
                    generation.fail(error)  # it is not the client that ends it
                    raise
    whole = iter(reply.whole(choices, generation.usage))
    is_long = sum(len(generation.echoes[choice.index]) + choice.num_characters for choice in choices) > LONG_REPLY
    pieces = []
    while (piece := await generation.long_work.next(whole) if is_long else next(whole, None)) is not None:
        if isinstance(piece, bytes):
            held.write(len(piece))
        pieces.append(piece)
    return pieces


def _event(data: str) -> bytes:
    if not data.isascii():
        for end, spelled in _LINE_ENDS.items():  # str.translate takes a hundred times as long, of an echoed megabyte
            data = data.replace(end, spelled)
    return f"data: {data}\n\n".encode()
