"""What routes ask for costs no turn of a thread."""

import threading

from scripted_engine import live_server


def workers() -> set[threading.Thread]:
    """FastAPI's: they stay a while."""
    return {thread for thread in threading.enumerate() if thread.name == "AnyIO worker thread"}


def test_no_route_hands_what_it_depends_on_to_a_thread() -> None:
    before = workers()
    with live_server() as server, server.client() as client:
        asked = {"model": "tiny", "prompt": "a", "max_tokens": 2}
        assert client.post("/v1/completions", json=asked).status_code == 200
        assert client.get("/v1/files").status_code == 200
        assert client.post("/v1/unload_lora_adapter", json={"lora_name": "a"}).status_code == 404
        assert workers() <= before  # those of servers that have ended may end, too
