"""Requests as bytes, nearly all of them wrong: in their lines, headers, lengths, chunks or anywhere. The same random
numbers make the same ones. Knows no server."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

JSON = b"Content-Type: application/json"
BOUNDARY = b"XX"
UPLOAD = (
    b'--XX\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n'
    b'--XX\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{"messages": []}\n\r\n--XX--\r\n'
)
METHODS = (
    b"GET", b"HEAD", b"OPTIONS", b"TRACE", b"CONNECT", b"PRI", b"get", b"G\x00T", b"POST\t", b"", b"\xff\xfe", b"(){}",
    b"A" * 5000,
)  # fmt: skip
TARGETS = (
    b"*", b"", b"/%00", b"/%ff%fe", b"/../../etc/passwd", b"/v1/%2e%2e/%2e%2e", b"//", b"http://a@b:99999/health",
    b"/health\x00", b"/health?\xc3\xa9", b"/v1/files/" + b"%" * 100, b"/health#x", b"localhost:80", b"/" + b"a" * 9000,
    b"/v1/models/" + b"../" * 50, b"http://[::1/health", b"/health?" + b"a=b&" * 2000,
)  # fmt: skip
VERSIONS = (
    b"HTTP/1.0", b"HTTP/0.9", b"HTTP/1.2", b"HTTP/2.0", b"HTTP/1.1 ", b"http/1.1", b"HTTP/9999999999.1", b"", b"HTTP",
    b"HTTP/1.1\x00", b"ICY/1.1",
)  # fmt: skip
HEADERS = (
    b"", b"no colon", b": no name", b" folded: x", b"A\x00: b", b"A: b\x00", b"A : b", b"A: \xff\xfe", b"A: b\nC: d",
    b"A: b\rC: d", b"Host: else", b"Expect: 100-continue", b"Expect: 200-ok", b"Connection: keep-alive, close, x",
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==",
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__", b"Content-Type: a/b",
    b"Content-Encoding: gzip", b"Authorization: Bearer \xf0\x9f", b"Authorization: " + b"x" * 9000, b"Range: bytes=9-1",
    b"X-Request-Id: a\tb", b"Trailer: Content-Length", b"Cookie: " + b"a=b;" * 500, b"\xef\xbb\xbfA: b",
)  # fmt: skip
LENGTHS = (
    b"0", b"1", b"-1", b"+5", b"0x10", b"1e3", b"5, 5", b"5, 6", b"99", b"9" * 30, b"", b" ", b"5\x00", b"1000000000",
    b"\xd9\xa3", b"00000000000000000005",
)  # fmt: skip
CODINGS = (b"chunked", b"CHUNKED", b"gzip, chunked", b"chunked, chunked", b"xchunked", b"identity", b"chunked\x00", b"")
SIZES = (
    b"0", b"-1", b"+5", b"0x5", b"5 ", b" 5", b"f" * 8, b"f" * 20, b"f" * 40, b"g", b"", b"5;a=b", b"5;" + b"a" * 5000,
    b"5\n", b"\x005", b"00000005",
)  # fmt: skip
TRAILERS = (b"", b"A: b\r\n", b"Content-Length: 9\r\n", b"no colon\r\n", b"A: " + b"b" * 20_000 + b"\r\n", b"\x00\r\n")
NO_HTTP = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x5a" * 500, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\r\n" * 50,
    b"SSH-2.0-x\r\n", b"\x00" * 1000, b"\xff" * 1000, b"PROXY TCP4 1.1.1.1 2.2.2.2 1 2\r\n", b"HTTP/1.1 200 OK\r\n\r\n",
)  # fmt: skip
MOST_HEADERS = 2000
CUT_AT = 6  # a request comes in up to so many parts


@dataclass(slots=True)
class Parts:
    method: bytes
    target: bytes
    version: bytes = b"HTTP/1.1"
    headers: list[bytes] = field(default_factory=list)
    body: bytes = b""

    def raw(self) -> bytes:
        lines = [self.method + b" " + self.target + b" " + self.version, *self.headers, b"", b""]
        return b"\r\n".join(lines) + self.body

    def drop(self, name: bytes) -> None:
        self.headers = [header for header in self.headers if not header.lower().startswith(name)]


Mutation = Callable[[Random, Parts], None]


def good(random: Random, model: str) -> Parts:
    """One that is answered, or refused for what it names."""
    chat: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 1}
    plain: dict[str, Any] = {"model": model, "prompt": "Hi.", "max_tokens": 1}
    paths = {"/v1/chat/completions": chat, "/v1/completions": plain, "/tokenize": {"model": model, "prompt": "Hi."}}
    kind = random.randrange(8)
    if kind < 5:
        path = random.choice(list(paths))
        body = json.dumps(paths[path] | ({"stream": True} if path != "/tokenize" and random.random() < 0.3 else {}))
        parts = Parts(b"POST", path.encode(), headers=[JSON], body=body.encode())
    elif kind < 6:
        kind_of_body = b"Content-Type: multipart/form-data; boundary=" + BOUNDARY
        parts = Parts(b"POST", b"/v1/files", headers=[kind_of_body], body=UPLOAD)
    else:
        gets = (b"/health/live", b"/v1/models", b"/v1/files", b"/", b"/v1/files/file-0/content", b"/v1/nowhere")
        parts = Parts(random.choice((b"GET", b"GET", b"DELETE")), random.choice(gets))
    parts.headers = [b"Host: here", b"Connection: close", *parts.headers]
    if parts.body and random.random() < 0.3:
        parts.headers.append(b"Transfer-Encoding: chunked")
        parts.body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(parts.body), parts.body)
    elif parts.body:
        parts.headers.append(b"Content-Length: %d" % len(parts.body))
    return parts


def _line(random: Random, parts: Parts) -> None:
    if random.random() < 0.4:
        parts.method = random.choice(METHODS)
    if random.random() < 0.4:
        parts.target = random.choice(TARGETS)
    if random.random() < 0.4:
        parts.version = random.choice(VERSIONS)


def _header(random: Random, parts: Parts) -> None:
    parts.headers.insert(random.randrange(len(parts.headers) + 1), random.choice(HEADERS))


def _many_headers(random: Random, parts: Parts) -> None:
    count = random.randrange(1, MOST_HEADERS)
    parts.headers += [b"X-%d: %b" % (number, b"x" * random.randrange(20)) for number in range(count)]


def _long_header(random: Random, parts: Parts) -> None:
    parts.headers.append(b"X-Long: " + b"x" * random.choice((1_000, 16_384, 65_536, 131_072)))


def _fewer_headers(random: Random, parts: Parts) -> None:
    if parts.headers:
        parts.headers.pop(random.randrange(len(parts.headers)))


def _length(random: Random, parts: Parts) -> None:
    """A lie, alone or beside another length."""
    if random.random() < 0.7:
        parts.drop(b"content-length")
    parts.headers.append(b"Content-Length: " + random.choice(LENGTHS))


def _coding(random: Random, parts: Parts) -> None:
    parts.headers.append(b"Transfer-Encoding: " + random.choice(CODINGS))


def _chunks(random: Random, parts: Parts) -> None:
    parts.drop(b"content-length")
    parts.drop(b"transfer-encoding")
    parts.headers.append(b"Transfer-Encoding: chunked")
    sizes = [random.choice(SIZES) if random.random() < 0.5 else b"5" for _ in range(random.randrange(1, 6))]
    chunks = [size + b"\r\n" + b"{}   " + random.choice((b"\r\n", b"\r\n", b"", b"\n")) for size in sizes]
    parts.body = b"".join([*chunks, b"0\r\n", random.choice(TRAILERS), b"\r\n"])


def _flipped(random: Random, raw: bytes) -> bytes:
    changed = bytearray(raw)
    for _ in range(random.randrange(1, 8)):
        changed[random.randrange(len(changed))] = random.choice((0, 10, 13, 32, 58, 255, random.randrange(256)))
    return bytes(changed)


def _cut(random: Random, raw: bytes) -> bytes:
    return raw[: random.randrange(1, len(raw) + 1)]


def _without(random: Random, raw: bytes) -> bytes:
    begin = random.randrange(len(raw))
    return raw[:begin] + raw[begin + random.randrange(1, 40) :] or b"\n"


def _twice(random: Random, raw: bytes) -> bytes:
    begin = random.randrange(len(raw))
    return raw[:begin] + raw[begin : begin + random.randrange(1, 200)] * random.randrange(2, 5) + raw[begin:]


def _inserted(random: Random, raw: bytes) -> bytes:
    at = random.randrange(len(raw) + 1)
    return (
        raw[:at] + random.choice((b"\x00", b"\r\n", b"\r\n\r\n", b"\n", b"\r", b"\t", random.randbytes(30))) + raw[at:]
    )


def _bare_ends(_random: Random, raw: bytes) -> bytes:
    return raw.replace(b"\r\n", b"\n")


MUTATIONS: tuple[Mutation, ...] = (
    _line, _header, _header, _many_headers, _long_header, _fewer_headers, _length, _length, _coding, _chunks, _chunks,
)  # fmt: skip
BYTE_MUTATIONS = (_flipped, _flipped, _cut, _without, _twice, _inserted, _bare_ends)


def mutated(random: Random, model: str) -> bytes:
    """A request with something wrong in it, or behind or in front of others on one connection."""
    if random.random() < 0.02:
        return random.choice(NO_HTTP)
    parts = good(random, model)
    for _ in range(random.randrange(3)):
        random.choice(MUTATIONS)(random, parts)
    raw = parts.raw()
    if random.random() < 0.5:
        raw = random.choice(BYTE_MUTATIONS)(random, raw)
    if random.random() < 0.15:  # pipelined: what is wrong comes first, last, or in the midst
        others = [good(random, model) for _ in range(random.randrange(1, 4))]
        for other in others:
            other.drop(b"connection")
        at = random.randrange(len(others) + 1)
        raw = b"".join([*(one.raw() for one in others[:at]), raw, *(one.raw() for one in others[at:])])
    return raw


def in_parts(random: Random, raw: bytes) -> list[bytes]:
    """As they are sent one after the other: mostly as one."""
    if random.random() < 0.7:
        return [raw]
    cuts = sorted(random.randrange(len(raw) + 1) for _ in range(random.randrange(1, CUT_AT)))
    return [raw[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
