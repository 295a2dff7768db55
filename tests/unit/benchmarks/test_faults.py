"""What a fault's reply is counted as, and what a started server is asked."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from benchmarks import fault_clients, fault_tables, faults
from benchmarks.fault_clients import Target
from benchmarks.fault_list import EITHER, HUGE, REFUSED
from benchmarks.fault_list import faults as all_faults
from benchmarks.fault_outcomes import Expected, Outcome, Reply, classify, error_of, in_openai_shape, names

OPENAI = {"error": {"message": "'n' is too small", "type": "invalid_request_error", "param": "n", "code": None}}
FASTAPI = {"detail": [{"loc": ["body", "n"], "msg": "too small"}]}
ANSWER = {"choices": [{"message": {"content": "Hello"}, "finish_reason": "length"}]}
BEGUN = b'data: {"choices": [{"delta": {"content": "He"}, "finish_reason": null}]}\n\n'
FINISHED = BEGUN + b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
UNQUOTED = BEGUN + b'data: {"error": "max_tokens is "-1""}\n\n'
GOOD = Expected(frozenset(), answer=True, within_ms=100)
ENDS = Expected(frozenset(), answer=True, exit_codes=frozenset({0}))


def reply(status: int | None, body: object, ms: float = 1.0, *, late: bool = False, code: int | None = None) -> Reply:
    return Reply(status, body if isinstance(body, bytes) else json.dumps(body).encode(), ms, late, code)


@pytest.mark.parametrize(
    ("seen", "expected", "outcome"),
    [
        (reply(400, OPENAI), REFUSED, Outcome.RIGHT),
        (reply(422, FASTAPI), REFUSED, Outcome.RIGHT),
        (reply(404, OPENAI), REFUSED, Outcome.WRONG),
        (reply(400, OPENAI), GOOD, Outcome.WRONG),
        (reply(200, ANSWER), REFUSED, Outcome.WRONG),
        (reply(200, ANSWER), EITHER, Outcome.RIGHT),
        (reply(200, {"choices": []}), EITHER, Outcome.WRONG),
        (reply(200, FINISHED), EITHER, Outcome.RIGHT),
        (reply(200, BEGUN), EITHER, Outcome.WRONG),
        (reply(200, UNQUOTED), REFUSED, Outcome.RIGHT),
        (reply(200, BEGUN + b'data: {"error": {}}\n\n'), GOOD, Outcome.WRONG),
        (reply(200, ANSWER, 101.0), GOOD, Outcome.WRONG),
        (reply(200, FINISHED, code=0), ENDS, Outcome.RIGHT),
        (reply(200, FINISHED, code=1), ENDS, Outcome.WRONG),
        (reply(200, BEGUN, code=0), ENDS, Outcome.WRONG),
        (reply(500, b"Internal Server Error"), REFUSED, Outcome.SERVER_ERROR),
        (reply(None, b""), REFUSED, Outcome.WRONG),
        (reply(None, b"", late=True), REFUSED, Outcome.HANG),
        (reply(200, BEGUN, late=True), EITHER, Outcome.HANG),
    ],
)
def test_outcomes(seen: Reply, expected: Expected, outcome: Outcome) -> None:
    assert classify(seen, expected, 1.0) is outcome


def test_what_a_server_does_afterwards_counts_more_than_its_reply() -> None:
    assert classify(reply(400, OPENAI), REFUSED, 31.0) is Outcome.HANG
    assert classify(reply(400, OPENAI), REFUSED, None) is Outcome.GONE


@pytest.mark.parametrize(
    ("seen", "shape"),
    [
        (reply(400, OPENAI), True),
        (reply(422, OPENAI), False),
        (reply(422, FASTAPI), False),
        (reply(400, {"error": "no"}), False),
        (reply(400, {"error": {"message": "no", "type": "x"}}), False),
        (reply(200, b"data: " + json.dumps(OPENAI).encode() + b"\n\n"), True),
        (reply(200, UNQUOTED), False),
        (reply(200, ANSWER), True),
        (reply(200, {"hello": 1}), False),
    ],
)
def test_openai_shape(seen: Reply, shape: bool) -> None:
    assert in_openai_shape(seen) is shape


def test_an_error_names_the_field_or_not() -> None:
    assert names(reply(400, OPENAI), "n")
    assert names(reply(422, FASTAPI), "n")
    assert not names(reply(400, {"error": {"message": "nonsense", "param": None}}), "n")
    assert error_of(b"Internal Server Error") is None


class Careless(BaseHTTPRequestHandler):
    """Answers whatever it is sent, but for JSON that it cannot read: then it says 500."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        try:
            json.loads(body)
        except ValueError:
            self.send_error(500)
            return
        answer = json.dumps(ANSWER).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


@pytest.fixture
def careless() -> Iterator[Target]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Careless) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Target(f"http://127.0.0.1:{server.server_port}", "m", 64)
        server.shutdown()
        thread.join()


def test_a_careless_server_is_found_out(careless: Target) -> None:
    rows = {fault.name: faults.send(fault, careless) for fault in all_faults(1e4) if fault.quick}
    outcomes = {name: row["outcome"] for name, row in rows.items()}

    assert outcomes["a body that is no JSON"] == "5xx"
    assert outcomes["temperature -1"] == outcomes["a body of 50 MB (in metadata)"] == "wrong answer"
    assert outcomes["20 stop strings"] == outcomes["half a body, then silence"] == "right"
    assert outcomes["GET on a POST route"] == "5xx"  # 501


def test_a_server_that_is_not_there_is_gone() -> None:
    nowhere = Target("http://127.0.0.1:9", "m", 64)

    assert fault_clients.answers_after(nowhere, 0.1) is None


def test_requests_carry_the_fault_and_nothing_else_unusual(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []

    def post(target: Target, content: bytes) -> Reply:
        sent.append(content)
        return reply(200, ANSWER)

    monkeypatch.setattr(fault_clients, "post", post)
    by_name = {fault.name: fault for fault in all_faults(1.0)}
    target = Target("http://x", "m", 64)
    for name in ("NaN in the JSON", "half a surrogate pair", "no model", "a body of 50 MB (in metadata)"):
        by_name[name].act(target)

    assert b'"temperature": NaN' in sent[0]
    assert rb"hello\ud800" in sent[1]
    assert json.loads(sent[2]).keys() == target.good_body().keys() - {"model"}
    assert len(sent[3]) > HUGE


def test_the_table_counts_and_names_what_went_wrong(tmp_path: Path) -> None:
    def run(*outcomes: tuple[str, str]) -> faults.Row:
        rows = [
            {"fault": fault, "outcome": outcome, "in_openai_shape": True, "names_field": None, "ms": 2000.0}
            for fault, outcome in outcomes
        ]
        return {"faults": rows, "counts": faults.counts({"faults": rows})}

    machine = {"transformers": "5", "cores": 2, "threads": 1, "cpu": "CPU"}
    machine |= {"commit": "0123456789abc", "date": "2026-11-23T00:00:00"}
    servers = {
        "longwave": run(("n 0", "right")),
        "transformers": run(("n 0", "wrong answer"), ("max_tokens 0", "5xx"), ("NaN", "right")),
    }
    (tmp_path / "faults_cpu.json").write_text(json.dumps({"machine": machine, "servers": servers}))
    text = fault_tables.faults(tmp_path)

    assert "| ours | 1 | 1 | 1 of 1 | 0 | 0 | 0 | 0 |" in text
    assert "| transformers serve | 3 | 1 | 1 of 3 | 1 | 1 | 0 | 0 |" in text
    assert "- ours: nothing; the slowest reply to a request, 2000 ms, was that to n 0." in text
    assert "- transformers serve: 5xx (1): max_tokens 0; wrong answer (1): n 0." in text
