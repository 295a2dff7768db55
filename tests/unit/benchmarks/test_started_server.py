"""Servers that benchmarks start end with them."""

import os
import signal
import subprocess
import sys
import time

import pytest

SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Ready(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[2])), Ready).serve_forever()
"""
BENCHMARK = f"""
import sys, time
from benchmarks.started_server import started
with started([sys.executable, "-c", {SERVER!r}], "/") as (_, process):
    print(process.pid, flush=True)
    time.sleep(60)
"""


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_benchmark_that_is_told_to_end_leaves_no_server(sign: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BENCHMARK], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        server = int(process.stdout.readline())
        process.send_signal(sign)
        process.wait(20)
        end = time.monotonic() + 10
        while is_there(server) and time.monotonic() < end:
            time.sleep(0.05)
        left = is_there(server)
        if left:
            os.kill(server, signal.SIGKILL)
    assert not left
