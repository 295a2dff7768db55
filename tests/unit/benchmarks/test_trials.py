"""What a trial's numbers are made of: answers, what a process holds, who it speaks with; and how they are kept."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import agreement as agreement_trial
from benchmarks import egress, faults, trial_list, trial_server, trial_tables
from benchmarks.agreement import Token, compare, prompts_of
from benchmarks.cache_timing import auc
from benchmarks.egress import ends_of, leaves_machine
from benchmarks.fault_clients import Target
from benchmarks.mixed_traffic import EVERY_KIND, MIXED
from benchmarks.process_tree import children, family, zombies
from benchmarks.retry_storm import crowd
from benchmarks.trial import Measure, Scale, Trial, percentile
from benchmarks.trial_client import Answer, ask, closed_loop, open_loop, rate_between
from benchmarks.trial_server import TrialServer, held, samples

ERROR = b'{"error":{"message":"full","type":"service_unavailable_error","param":null,"code":"server_is_overloaded"}}'
LATER = "HTTP/1.1 503 X\r\ncontent-type: application/json\r\nretry-after: 3"
CHUNK = b'data: {"choices":[{"delta":{"content":"Hi"}}]}\n\n'


def answer(status: int | None, body: bytes, head: str = "", ended: float = 1.0) -> Answer:
    return Answer(status, head, body, 0.0, None, ended)


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))


@pytest.mark.parametrize(
    ("seen", "whole", "refusal", "clear"),
    [
        (answer(200, chunked(CHUNK, b"data: [DONE]\n\n")), True, False, True),
        (answer(200, b'{"choices":[{"finish_reason":"stop"}]}'), True, False, True),
        (answer(200, chunked(CHUNK, b"data: " + ERROR + b"\n\n")), False, False, True),
        (answer(200, chunked(CHUNK)), False, False, False),
        (answer(503, ERROR, LATER), False, True, True),
        (answer(503, ERROR, "HTTP/1.1 503 X"), False, False, False),
        (answer(503, b"busy", LATER), False, False, False),
        (answer(500, ERROR, LATER), False, False, False),
        (answer(None, b""), False, False, False),
    ],
)
def test_answers_are_whole_or_clear_or_neither(seen: Answer, whole: bool, refusal: bool, clear: bool) -> None:
    assert (seen.is_whole, seen.is_refusal, seen.is_clear) == (whole, refusal, clear)


def test_a_guess_by_time_is_as_good_as_the_pairs_that_it_tells_apart() -> None:
    assert auc([1, 2], [3, 4]) == 1
    assert auc([3, 4], [1, 2]) == 0
    assert auc([1, 1], [1]) == 0.5
    assert auc([1, 5], [3, 3, 5]) == (3 + 0.5) / 6


class Listener:
    """Replies to whatever it is sent with a stream, whose end it keeps back where the path says so."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunked(CHUNK)[:-5])
        await writer.drain()
        if b"/stalls" in head:
            with suppress(ConnectionResetError):
                await reader.read()
            self.left.set()
        else:
            writer.write(chunked(b"data: [DONE]\n\n"))
        writer.close()


def test_a_client_reads_to_the_end_or_leaves() -> None:
    async def both() -> tuple[Answer, Answer, Answer]:
        listener = Listener()
        async with await asyncio.start_server(listener, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            read = await ask(url, b"{}")
            left = await ask(url, b"{}", "/stalls", leave=lambda _came, has_text: has_text)
            await asyncio.wait_for(listener.left.wait(), 10)
        return read, left, await ask(url, b"{}")

    read, left, refused = asyncio.run(both())
    assert read.is_whole
    assert read.first is not None
    assert read.sent <= read.first <= read.ended
    assert (left.status, left.is_whole, left.first is None) == (200, False, False)
    assert (refused.status, refused.is_clear) == (None, False)


def test_an_open_loop_sends_at_its_own_times_and_a_closed_one_waits() -> None:
    running = most = 0

    async def send(_number: int) -> Answer:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        return answer(200, b'"finish_reason":"stop"', ended=0.5)

    assert len(asyncio.run(open_loop(200, 0.1, send))) == 20
    assert most > 2
    most = 0
    answers = asyncio.run(closed_loop(2, 0.1, send))
    assert (most, len(answers) >= 2) == (2, True)
    assert rate_between(answers, 0.0, 2.0) == len(answers) / 2
    assert rate_between(answers, 0.6, 2.0) == 0


def test_percentiles_and_crowds() -> None:
    assert [percentile(range(1, 101), percent) for percent in (50, 99, 100)] == [50.5, 99.01, 100]
    assert percentile([], 99) == 0
    assert crowd([5.0, 0.0, 0.05, 9.0], 0.1) == 0.5
    assert crowd([], 0.1) == 0


def test_metrics_are_summed_over_labels() -> None:
    text = 'a_total{m="x",finished_reason="stop"} 2.0\na_total{m="x",finished_reason="abort"} 3.0\n# HELP b c\nb 4\n'
    assert samples(text) == {"a_total": 5.0, "a_total{stop}": 2.0, "a_total{abort}": 3.0, "b": 4.0}


def test_a_server_that_is_idle_holds_no_connection_of_who_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    """One file more than before was counted, now and then."""
    monkeypatch.setattr(trial_server, "CLOSING", 1.0)  # whatever else the machine does
    opened, closed = [], []

    class Slow(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            opened.append(self.client_address)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def finish(self) -> None:
            threading.Event().wait(0.05)  # until it notices that the client has gone
            closed.append(self.client_address)
            super().finish()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        TrialServer(Target(f"http://127.0.0.1:{server.server_port}", "little", 512)).idle_after()
        assert opened == closed != []
        server.shutdown()


def test_what_a_process_holds_and_who_comes_from_it() -> None:
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        child.stdout.readline()  # Python is there
        now = held(child.pid)
        assert child.pid in children(os.getpid())
        assert child.pid in family(os.getpid())
        assert (now.rss_mb > 1, now.files >= 3, now.threads) == (True, True, 1)
        before = zombies(os.getpid())
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert zombies(os.getpid()) == before + 1


def test_both_ends_of_a_socket_are_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        ports = {f"0100007F:{port:04X}" for port in (server.getsockname()[1], client.getsockname()[1])}
        assert any({mine, other} == ports for mine, other in ends_of(os.getpid()))
    assert list(ends_of(2**22 + 1)) == []


def test_what_python_connects_sends_and_looks_up_is_noted(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(egress.HOOK)
    notes = tmp_path / "notes"
    notes.touch()
    done = "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.connect(('127.0.0.1', 9)); s.close();"
    done += "socket.getaddrinfo('192.0.2.1', 80, flags=socket.AI_NUMERICHOST)"
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "EGRESS_NOTES": str(notes)}
    subprocess.run([sys.executable, "-c", done], env=environment, check=True)
    noted = [json.loads(line) for line in notes.read_text().splitlines()]
    assert noted == [["begins", sys.executable], ["AF_INET", "127.0.0.1"], ["a name", "192.0.2.1"]]
    assert [leaves_machine(*one) for one in noted] == [False, False, True]
    assert not leaves_machine("AF_UNIX", "/tmp/socket")


def test_a_trial_is_kept_beside_what_the_file_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measures = [Measure("answers", 7000), Measure("lost", 0, 0), Measure("share", 0.85, 0.9, at_least=True)]
    monkeypatch.setitem(trial_list.TRIALS, "soak", Trial("soak", "traffic", lambda _scale: measures))
    machine = {"cores": 2, "cpu": "CPU", "commit": "0123456789abc", "date": "2026-11-28T00:00:00"}
    out = tmp_path / trial_tables.FILE
    out.write_text(json.dumps({"servers": {"longwave": {}}}))
    assert trial_tables.trials(tmp_path) is None

    row = trial_list.run("soak", Scale()) | {"machine": machine}
    faults.keep(out, {"trials": {"soak": row}})

    assert not row["met"]
    assert json.loads(out.read_text()).keys() == {"servers", "trials"}
    text = trial_tables.trials(tmp_path) or ""
    assert "2 cores, CPU, commit 0123456789, 2026-11-28" in text
    assert "| soak | traffic | answers 7,000; lost 0 (0); share 0.85 (≥ 0.9) | 1 of 2; not: share |" in text
    assert "share: 0.85 (>= 0.9, NOT MET)" in trial_list.report(row)

    faults.keep(out, {"servers": {"longwave": {"faults": []}}})
    assert json.loads(out.read_text())["trials"].keys() == {"soak"}


def test_a_trial_that_raises_has_failed_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(_scale: Scale) -> list[Measure]:
        raise SystemError("no server")

    monkeypatch.setitem(trial_list.TRIALS, "soak", Trial("soak", "traffic", raises))
    row = trial_list.run("soak", Scale())
    assert (row["met"], row["failure"], row["measures"]) == (False, "SystemError: no server", [])
    assert "SystemError: no server" in trial_list.report(row)

    out = tmp_path / "new" / "folder" / trial_tables.FILE
    monkeypatch.setattr(sys, "argv", ["faults", "--trials", "soak", "--out", str(out), "--commit", "c"])
    with pytest.raises(SystemExit) as ended:
        faults.main()
    assert ended.value.code == 1
    assert json.loads(out.read_text())["trials"]["soak"]["failure"] == "SystemError: no server"


def test_every_kind_of_request_is_in_the_mix_but_for_jobs() -> None:
    assert set(EVERY_KIND) - set(MIXED) == {EVERY_KIND[-1]}


def test_answers_agree_until_they_first_differ() -> None:
    alone = [[Token(b"a", -0.5, 1.0), Token(b"b", -0.7, 0.01), Token(b"c", -0.1, 1.0)], [Token(b"d", -0.2, 2.0)]]
    other = [[Token(b"a", -0.25, 1.0), Token(b"x", -0.7, 0.02), Token(b"c", -0.1, 1.0)]]
    found = compare(alone, other)
    assert (found.gaps, found.leads, found.positions, found.share) == ([0.25], [0.02], [1], 0.5)
    assert compare(alone, alone).share == 1


def test_prompts_are_the_same_each_time_and_differ() -> None:
    prompts = list(prompts_of(50))
    assert prompts == list(prompts_of(50))
    assert len(set(prompts)) == 50
    assert max(map(len, prompts)) > 10 * min(map(len, prompts))


def test_a_trial_of_nothing_is_a_wrong_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["faults", "--trials", "agreement_float32", "--prompts", "0"])
    with pytest.raises(SystemExit) as ended:
        faults.main()
    assert ended.value.code == 2


@pytest.mark.parametrize("count", [1, 2, 5])
def test_answers_of_few_prompts_are_compared_too(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def no_server(_model: str, _flags: Sequence[str]) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(metrics=dict)

    async def answers(_server: object, prompts: Sequence[str], _at_once: int) -> list[list[Token]]:
        return [[Token(b"a", -1.0, 1.0)] for _ in prompts]

    monkeypatch.setattr(agreement_trial, "trial_server", no_server)
    monkeypatch.setattr(agreement_trial, "_answers", answers)
    shares = [one for one in agreement_trial.in_float32(Scale(prompts=count)) if "share of tokens" in one.name]
    assert [one.value for one in shares] == [1.0] * 5
