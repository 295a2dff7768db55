"""SIGTERM: no new work, running answers finish, exit 0. (The shared server is terminated when idle.)"""

from pathlib import Path

import httpx
import pytest

from .conftest import FLAGS
from .questions import CAPITAL, MODEL
from .server_process import ServerProcess, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BODY = {
    "model": MODEL,
    "messages": [{"role": "user", "content": CAPITAL}],
    "max_tokens": 60,
    "ignore_eos": True,
    "stream": True,
}


def test_a_running_stream_finishes_and_the_server_exits_with_0(bundled_model: Path) -> None:
    with ServerProcess(*FLAGS) as server:
        url = f"{server.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=BODY, timeout=60) as reply:
            lines = reply.iter_lines()
            wait_until(lambda: '"content"' in next(lines), "the first text")
            server.terminate()
            wait_until(lambda: server.get("/health/ready").status_code == 503, "readiness is false")
            refused = server.post("/v1/chat/completions", BODY)
            rest = "\n".join(lines)

        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert '"finish_reason":"length"' in rest.replace(": ", ":")
        assert rest.rstrip().endswith("data: [DONE]")
        assert server.wait() == 0
