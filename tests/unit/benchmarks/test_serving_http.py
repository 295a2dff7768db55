"""benchmarks/serving_http.py beside a server of its own process: what an answer's times are taken to be."""

import asyncio
import gc
import sys
from pathlib import Path

import pytest

from benchmarks.serving_cases import Answer
from benchmarks.serving_child import PORT, Plan
from benchmarks.serving_http import open_engine

#: Streams seven tokens in three chunks; with the usage so far, where it is asked for and not refused.
SERVER = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_): pass

    def reply(self, status, body, kind="text/plain"):
        self.send_response(status)
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.reply(200, b"")

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        running = "continuous_usage_stats" in asked["stream_options"]
        if running and sys.argv[2] == "refuses":
            return self.reply(400, b"{}")
        self.reply(200, b"", "text/event-stream")
        for count in (1, 4, 7):
            event = {"choices": [{"text": " a"}]}
            if running:
                event["usage"] = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": count}
            self.event(json.dumps(event))
            time.sleep(0.01)
        usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": 7}
        self.event(json.dumps({"choices": [], "usage": usage}))
        self.event("[DONE]")

    def event(self, data):
        self.wfile.write(b"data: " + data.encode() + bytes([10, 10]))
        self.wfile.flush()

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def answers(tmp_path: Path, manner: str, count: int) -> list[Answer]:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    plan = Plan(
        model="m",
        vocab_size=100,
        load_format="dummy",
        dtype="float32",
        device="cpu",
        cases=(),
        scale=1.0,
        spawned=0.0,
        command=(sys.executable, str(script), PORT, manner),
    )

    async def ask() -> list[Answer]:
        async with open_engine(plan) as engine:
            return [await engine.ask([1, 2, 3], 7) for _ in range(count)]

    try:
        return asyncio.run(ask())
    finally:
        gc.unfreeze()  # what it leaves out of collections stays there until its process ends


def test_a_chunk_of_several_tokens_is_as_many_equal_gaps(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (answer,) = answers(tmp_path, "tells", 1)
    assert answer.tokens == 7
    assert len(answer.itl) == 6
    assert answer.itl[0] == answer.itl[1] == answer.itl[2]
    assert answer.itl[3] == answer.itl[4] == answer.itl[5] != answer.itl[0]
    assert "ITL" not in capfd.readouterr().err


def test_a_server_that_does_not_tell_is_measured_by_chunks_and_it_is_said_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = answers(tmp_path, "refuses", 2)
    assert [(answer.tokens, len(answer.itl)) for answer in found] == [(7, 2)] * 2
    assert capfd.readouterr().err.count("ITL is a chunk's") == 1
