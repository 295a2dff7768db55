"""503 on /v1/training: who gets it, and who does not though the server is full or ending."""

import threading
from pathlib import Path

import pytest
from scripted_engine import LIMIT, Script, wait_until
from served_training import DATUM, create, ended, follow, post, retrieve, training_client, training_server

from server.answering import SignReader
from server.errors import EngineUnavailable, LongwaveError, ServerOverloaded

pytestmark = pytest.mark.timeout(180)


def test_one_call_too_many_is_refused_for_a_while_though_it_names_no_number(tmp_path: Path) -> None:
    with training_server(tmp_path) as server, training_client(server) as client:
        model = create(client)
        most = client.get("/get_server_capabilities").json()["max_pending_calls"]
        follow(tmp_path, hold="OptimStep")
        futures = [post(client, "optim_step", model_id=model) for _ in range(most)]
        for body in ({}, {"seq_id": most + 1}):
            refused = client.post("/optim_step", json={"model_id": model, **body})
            told = refused.json()["error"]
            assert (refused.status_code, told["code"], told["param"]) == (503, "server_is_overloaded", None)
            assert int(refused.headers["retry-after"]) >= 1
        (tmp_path / "go").touch()
        assert retrieve(client, futures[-1]["request_id"])["metrics"]["step"] == most
        assert post(client, "optim_step", model_id=model)["seq_id"] == most + 1


def test_a_sample_that_was_taken_before_the_drain_is_made_in_it(tmp_path: Path) -> None:
    with training_server(tmp_path, shutdown_timeout=LIMIT) as server, training_client(server) as client:
        model = create(client)
        follow(tmp_path, hold="Compute")
        server.engine.script = Script(hold_after=1)
        learning = post(client, "forward_backward", model_id=model, data=[DATUM])
        sampling = post(client, "sample", model_id=model, prompt=[1, 2])
        wait_until(lambda: (tmp_path / "log").read_text().endswith("Compute\n"))
        drained = threading.Thread(target=lambda: server.run(server.lifecycle.drain()))
        drained.start()
        wait_until(lambda: server.lifecycle.phase == "draining")
        refused = client.post("/sample", json={"model_id": model, "prompt": [1, 2]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_is_draining")
        assert not server.engine.requests  # the sample has not begun
        (tmp_path / "go").touch()
        wait_until(lambda: server.engine.held)
        assert not SignReader(server.lifecycle.answering.fd).is_up()  # what else was taken has all of the time
        server.engine.resume.set()
        assert retrieve(client, sampling["request_id"])["type"] == "sample"
        assert retrieve(client, learning["request_id"])["metrics"]["loss:sum"] == 1.5
        drained.join(LIMIT)
        assert not drained.is_alive()


@pytest.mark.parametrize("failure", [ServerOverloaded("It is full."), EngineUnavailable("It stopped.")])
def test_a_call_that_ended_with_503_sends_nobody_to_ask_again(tmp_path: Path, failure: LongwaveError) -> None:
    with training_server(tmp_path) as server, training_client(server) as client:
        model = create(client)
        server.engine.script = Script(fail_after=1, failure=failure)
        future = post(client, "sample", model_id=model, prompt=[1, 2])
        for _ in range(2):
            reply = ended(client, future["request_id"])
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, failure.code)
            assert reply.headers["x-should-retry"] == "false"
            assert "retry-after" not in reply.headers
        server.engine.script = Script()
        again = post(client, "sample", model_id=model, prompt=[1, 2])
        assert retrieve(client, again["request_id"])["type"] == "sample"
