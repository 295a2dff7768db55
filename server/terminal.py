"""`longwave chat`: a conversation in the terminal with any OpenAI-compatible server. Must not know ours from inside."""

import io
import json
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.console import Console

CONNECT_TIMEOUT = 10.0
EXITS = frozenset({"/exit", "/quit", "/bye"})
# A model may write escape sequences, and a terminal would obey them.
NOT_SHOWN = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
SILENCE_TIMEOUT = 60.0  # the server pings every ten seconds, so this much silence is a dead connection


class ChatError(Exception):
    """What the server, or the way to it, refused: one sentence."""


@dataclass(slots=True)
class Conversation:
    client: httpx.Client
    model: str
    temperature: float = 1.0
    messages: list[dict[str, str]] = field(default_factory=list)
    cut_off: bool = False  # whether the last answer ended because it had no tokens left

    def ask(self, text: str) -> Generator[str, None, None]:
        """Pieces of the answer. An answer that is given up or fails leaves no trace in the conversation."""
        question = {"role": "user", "content": text}
        pieces = []
        body = {"model": self.model, "messages": [*self.messages, question], "temperature": self.temperature}
        self.cut_off = False
        for event in _stream(self.client, {**body, "stream": True}):
            self.cut_off |= any(choice.get("finish_reason") == "length" for choice in event.get("choices") or ())
            pieces.append(_text(event))
            yield pieces[-1]
        self.messages += [question, {"role": "assistant", "content": "".join(pieces)}]


def connect(url: str, api_key: str | None) -> httpx.Client:
    """Sends nothing yet. Raises ChatError."""
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    timeout = httpx.Timeout(SILENCE_TIMEOUT, connect=CONNECT_TIMEOUT)
    url = url if "://" in url else f"http://{url}"
    try:
        return httpx.Client(base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=timeout)
    except httpx.InvalidURL as error:
        raise ChatError(f"{url} is no URL: {error}") from error
    except UnicodeEncodeError:
        raise ChatError("an API key is printable ASCII: it is sent in a header") from None


def first_model(client: httpx.Client) -> str:
    with _explained(client):
        reply = client.get("/v1/models")
        _check(reply)
        try:
            return str(reply.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise ChatError(f"{reply.url} names no model: give --model, or the URL of another server") from None


def talk(conversation: Conversation, console: Console) -> int:
    """Reads lines until the input ends; returns an exit code. Ctrl-C ends the answer, or at the prompt the program."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    failed = False
    for line in _lines(conversation.model, console) if sys.stdin.isatty() else sys.stdin:
        text = line.strip()
        if text in EXITS:
            break
        if text:
            failed |= not _answer(conversation, text, console)
    return int(failed)


def _lines(model: str, console: Console) -> Iterator[str]:
    """What a person types, with the arrow keys and history of readline where Python has it."""
    with suppress(ImportError):
        import readline  # noqa: F401 - input() uses it once it is there
    console.print(f"{model}. Ctrl-C stops an answer; Ctrl-D or /exit ends.", style="dim", highlight=False, markup=False)
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        yield line


def _answer(conversation: Conversation, line: str, console: Console) -> bool:
    answer = conversation.ask(line)
    try:
        for piece in answer:
            console.file.write(piece.translate(NOT_SHOWN))
            console.file.flush()
        if conversation.cut_off:
            console.file.write(" [cut off: no tokens left]")
    except KeyboardInterrupt:
        answer.close()  # hangs up, which ends the server's work
        console.file.write(" [stopped]")
    except ChatError as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False)
        return False
    finally:
        console.file.write("\n")
    return True


def _stream(client: httpx.Client, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    content = json.dumps(body, ensure_ascii=False).encode(errors="replace")  # a flag may have been no UTF-8
    headers = {"content-type": "application/json"}
    with _explained(client), client.stream("POST", "/v1/chat/completions", content=content, headers=headers) as reply:
        if reply.is_error:
            reply.read()
            _check(reply)
        for line in _lines_of(reply):
            if not line.startswith(b"data:"):  # a ping or the blank line between events
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            yield _event(data)
    raise ChatError("the answer broke off")


def _lines_of(reply: httpx.Response) -> Iterator[bytes]:
    """httpx's own end at U+2028 and its like too, which are text of an answer."""
    rest = b""
    for piece in reply.iter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line.removesuffix(b"\r") for line in lines)


def _event(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise ChatError(f"the server sent what is no event of an answer: {data[:80]!r}")
    if event.get("error"):
        raise ChatError(_message(event["error"]))
    return event


def _text(event: dict[str, Any]) -> str:
    return "".join((choice.get("delta") or {}).get("content") or "" for choice in event.get("choices") or ())


def _message(error: Any) -> str:
    """Of an error in OpenAI's shape, or in that of servers that send less."""
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or error)


def _check(reply: httpx.Response) -> None:
    if reply.is_error:
        try:
            message = _message(reply.json()["error"])
        except (ValueError, KeyError, TypeError):
            message = f"the server replied {reply.status_code}"
        raise ChatError(message)


@contextmanager
def _explained(client: httpx.Client) -> Iterator[None]:
    """Turns a broken connection into one sentence."""
    try:
        yield
    except httpx.HTTPError as error:
        raise ChatError(f"cannot reach the server {client.base_url}: {error}") from error
