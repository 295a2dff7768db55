"""Trial: clients that ask for streams and never read them, and others that do. Design: R3."""

import asyncio
import os
import secrets
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.trial import Measure, Scale, percentile
from benchmarks.trial_client import Answer, ask, chat, closed_loop, request
from benchmarks.trial_server import Held, TrialServer, trial_server

TOKENS = 100  # with 20 alternatives each, some 200 KB of events: more than the buffers on the way to such a client take
RECEIVED, SEGMENT = 4096, 536  # bytes; by the latter the server's kernel sizes what it buffers
SHORT = 64  # tokens of the streams that are read
CLIENTS = 4  # that read them
SECONDS = 12.0  # of streams that are read: before, beside and after the others
#: Seconds until the server has closed the last: it looks after 60 s whether anything was read, and for as long again
#: where its system's buffers took some bytes at first. The place among the requests is free after the first 60.
LIMIT = 120.0
LATE = 5.0
SETTLES = 300.0  # seconds that all their tokens may take
POLL = 0.1
GENERATED = "longwave:generation_tokens_total"
REST = 0.5
FLAGS = ("--max-num-seqs", "128", "--max-queued-requests", "600", "--num-gpu-blocks-override", "2000")


def stalled_readers(scale: Scale) -> list[Measure]:
    with trial_server(scale.model, FLAGS) as server, ExitStack() as clients:
        asyncio.run(_read_all(server, scale.stalled // 5))  # pools and caches fill
        server.idle_after()
        before = server.held()
        alone = asyncio.run(_read(server))
        wanted = server.metrics()[GENERATED] + scale.stalled * TOKENS
        for _ in range(scale.stalled):
            clients.enter_context(_stalled(server))
        settled = _settled(server, wanted)
        held = [server.held()]
        beside = asyncio.run(_read(server))
        held.append(server.held())
        cut = _closed_after(server, before, settled)
        clients.close()
        alone += asyncio.run(_read(server))
        idle = server.idle_after()
        after = server.held()
    pace, other = (percentile([_ms_a_token(answer) for answer in answers], 50) for answers in (alone, beside))
    return [
        Measure("clients that read nothing", scale.stalled),
        Measure("of them not closed when other streams had been read", min(one.files for one in held) - before.files),
        Measure("growth of the process meanwhile, MB", max(one.rss_mb for one in held) - before.rss_mb, 50),
        Measure("streams that were read beside them", len(beside), 1, at_least=True),
        Measure("of them not whole", sum(not answer.is_whole for answer in [*alone, *beside]), 0),
        Measure("ms a token without them, p50", pace),
        Measure("beside them, of that", other / pace, 1.05),
        Measure("seconds from the last token until the last is cut", cut, LIMIT + LATE),
        Measure("seconds until all KV blocks are free", idle, 1),
        Measure("files more than before", after.files - before.files, 0),
    ]


async def _read_all(server: TrialServer, count: int) -> None:
    await asyncio.gather(*(ask(server.url, _body(server)) for _ in range(count)))


def _body(server: TrialServer) -> bytes:
    return chat(server, f"Count {secrets.token_hex(4)}.", TOKENS, stream=True, logprobs=True, top_logprobs=20)


def _stalled(server: TrialServer) -> socket.socket:
    place = urlsplit(server.url)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVED)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT)
    client.connect((place.hostname, place.port))
    client.sendall(request("/v1/chat/completions", _body(server)))
    return client


def _settled(server: TrialServer, wanted: float) -> float:
    """When so many tokens are generated, and written as far as anybody takes them: the server's process rests. Raises
    TimeoutError."""
    begin = time.monotonic()
    while server.metrics()[GENERATED] < wanted:
        if time.monotonic() - begin > SETTLES:
            raise TimeoutError(f"{wanted:.0f} tokens were not generated in {SETTLES:.0f} s")
        time.sleep(POLL)
    used = _cpu_seconds(server)
    while True:
        time.sleep(REST)
        before, used = used, _cpu_seconds(server)
        if used - before < REST / 10:
            return time.monotonic()


def _cpu_seconds(server: TrialServer) -> float:
    fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # proc(5): utime, stime


def _closed_after(server: TrialServer, before: Held, begin: float) -> float:
    """Seconds from then until the server has no connection more than before."""
    while server.held().files > before.files and time.monotonic() - begin < 2 * LIMIT:
        time.sleep(POLL)
    return time.monotonic() - begin


async def _read(server: TrialServer) -> list[Answer]:
    async def send(number: int) -> Answer:
        return await ask(server.url, chat(server, f"{number} {secrets.token_hex(4)}", SHORT, stream=True))

    return await closed_loop(CLIENTS, SECONDS, send)


def _ms_a_token(answer: Answer) -> float:
    assert answer.first is not None
    return 1e3 * (answer.ended - answer.first) / (SHORT - 1)
