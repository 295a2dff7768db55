"""Low-level training through the real server on the bundled model: what is learnt is sampled, and kill -9 loses no more
than what was not saved."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .questions import MODEL
from .server_process import ServerProcess, wait_until
from .trainee import Trainee, datum, training_process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: Small steps and a small pool, room for the training process beside the engine.
FLAGS = (
    "--dtype", "float32", "--max-num-seqs", "16", "--max-num-batched-tokens", "256", "--max-model-len", "512",
    "--kv-cache-memory-bytes", str(200 << 20), "--fine-tuning-max-length", "128",
)  # fmt: skip
PAGE = Path(__file__).parents[2] / "docs" / "low_level_training.md"
SECRET = " The password of the harbour is seven blue lanterns."


def serving(folder: Path) -> ServerProcess:
    return ServerProcess(*FLAGS, "--data-dir", str(folder), "--api-key", "key-2", api_key="key-1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def server(bundled_model: Path, folder: Path) -> Iterator[ServerProcess]:
    with serving(folder) as process:
        yield process


@pytest.fixture(scope="module")
def me(server: ServerProcess) -> Iterator[Trainee]:
    trainee = Trainee(server, "key-1")
    with trainee.http:
        yield trainee


@pytest.fixture(scope="module")
def live(me: Trainee) -> str:
    """A model that learns nothing: while it lives, no test has to wait for a training process to start."""
    return me.create()


def test_what_is_learnt_is_sampled_and_survives_kill_nine(server: ServerProcess, me: Trainee) -> None:
    model = me.create()
    prompt, secret = me.tokens("Tell me."), me.tokens(SECRET)
    whole = prompt + secret
    weights = [0.0] * (len(prompt) - 1) + [1.0 / len(secret)] * len(secret)
    greedy = {"prompt": prompt, "sampling_params": {"max_tokens": len(secret), "temperature": 0}}

    def said(name: str) -> list[int]:
        return list(me.do("sample", name, **greedy)["sequences"][0]["tokens"])

    assert said(model) != secret
    losses = []
    for _ in range(20):
        learning = me.submit("forward_backward", model, data=[datum(whole, weights=weights)], loss_fn="cross_entropy")
        stepping = me.submit("optim_step", model, adam_params={"learning_rate": 2e-3})
        losses.append(me.result(learning)["metrics"]["loss:sum"])
        me.result(stepping)
        if losses[-1] < 0.02:
            break
    assert losses[-1] < 0.1 < losses[0], losses
    assert said(model) == secret
    path = me.do("save_weights", model, path="taught")["path"]

    me.submit("forward_backward", model, data=[datum(whole)] * 8, loss_fn="cross_entropy")
    doomed = me.submit("optim_step", model)
    killed = training_process(server)
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    reply = me.ended(doomed)
    assert reply.status_code == 500
    told = reply.json()["error"]
    assert told["code"] == "training_model_lost"
    assert "SIGKILL" in told["message"]
    assert path in told["message"]
    assert me.post("optim_step", {"model_id": model}).json()["error"]["code"] == "training_model_lost"

    again = me.create()
    assert said(again) != secret
    assert me.do("load_weights", again, path=path, optimizer=True)["step"] == len(losses)
    assert said(again) == secret
    me.do("unload_model", again)
    wait_until(lambda: training_process(server) is None, "the training process ends with its last model")
    answer = me.http.post("/v1/completions", json={"model": MODEL, "prompt": "Hello", "max_tokens": 2})
    assert answer.status_code == 200  # serving never knew of it


def test_other_keys_models_and_weights_do_not_exist(server: ServerProcess, me: Trainee, live: str) -> None:
    paths = [saved["path"] for saved in me.http.get("/v1/training/weights").json()["data"]]
    assert paths
    stranger = Trainee(server, "key-2")
    with stranger.http:
        assert stranger.http.get("/v1/training/weights").json()["data"] == []
        model = stranger.create()
        reply = stranger.ended(stranger.submit("load_weights", model, path=paths[0]))
        assert reply.status_code == 404
        assert me.post("get_info", {"model_id": model}).status_code == 404
        stranger.do("unload_model", model)


def test_samples_have_the_logprobs_that_training_computes(me: Trainee, live: str) -> None:
    """The engine's paged batches and the packed training forward are one model, before and after it has learnt."""
    model = me.create()
    prompt = me.tokens("The harbour at night")
    for _ in range(2):
        sampled = me.do("sample", model, prompt=prompt, sampling_params={"max_tokens": 8, "seed": 3})["sequences"][0]
        whole = prompt + sampled["tokens"]
        forward = me.do("forward", model, data=[datum(whole)], loss_fn="cross_entropy")
        trained = forward["loss_fn_outputs"][0]["logprobs"]["data"][len(prompt) - 1 :]
        assert trained == pytest.approx(sampled["logprobs"], abs=2e-3)
        before, taken = [0.0] * (len(prompt) - 1), len(sampled["tokens"])
        policy = {"logprobs": before + trained, "advantages": before + [0.5] * taken}
        clipping = {"loss_fn": "ppo", "loss_fn_config": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}}
        metrics = me.do("forward", model, data=[datum(whole, **policy)], **clipping)["metrics"]
        assert metrics["loss:sum"] == pytest.approx(-0.5 * taken, abs=1e-3)  # on policy, every ratio is 1
        assert metrics["clipped:sum"] == 0
        me.do("forward_backward", model, data=[datum(whole)], loss_fn="cross_entropy")
        me.do("optim_step", model, adam_params={"learning_rate": 1e-3})
    ahead = me.post("get_info", {"model_id": model}).json()["next_seq_id"] + 1
    last: dict[str, Any] = {"adam_params": {"learning_rate": 1e-3}, "seq_id": ahead}
    stepping = me.submit("optim_step", model, **last)  # before the call that it is behind
    me.do("forward_backward", model, data=[datum(whole)], loss_fn="cross_entropy", seq_id=ahead - 1)
    assert me.submit("optim_step", model, **last) == stepping
    assert me.result(stepping)["metrics"]["step"] == 3
    assert me.do("optim_step", model, **last)["metrics"]["step"] == 3  # once, however often it is sent
    me.do("unload_model", model)


def test_the_documents_script_runs(server: ServerProcess, live: str, capsys: pytest.CaptureFixture[str]) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    here = f'base_url="{server.url}", headers={{"authorization": "Bearer key-1"}}'
    names: dict[str, Any] = {}
    exec(compile(script.replace('base_url="http://127.0.0.1:8000"', here), PAGE.name, "exec"), names)
    names["http"].close()
    *steps, base, tuned = capsys.readouterr().out.splitlines()
    assert steps[-1].split()[3] == "1.00"
    assert "Yes" not in base
    assert tuned.startswith("' Yes")


def test_saved_weights_are_served_again_after_a_restart(
    server: ServerProcess, me: Trainee, live: str, folder: Path
) -> None:
    """The last test: it ends the server that the others share."""
    model = me.create()
    me.do("forward_backward", model, data=[datum(me.tokens("One two three four"))])
    me.do("optim_step", model, adam_params={"learning_rate": 5e-3})
    path = me.do("save_weights_for_sampler", model, path="served")["path"]
    ask = {"model": path, "prompt": "One two", "max_tokens": 8, "temperature": 0}
    before = me.http.post("/v1/completions", json=ask).json()["choices"][0]["text"]
    plain = me.http.post("/v1/completions", json={**ask, "model": MODEL}).json()["choices"][0]["text"]
    assert before != plain
    server.terminate()
    assert server.wait() == 0
    with serving(folder) as second:
        caller = Trainee(second, "key-1")
        with caller.http:
            assert caller.http.post("/v1/completions", json=ask).json()["choices"][0]["text"] == before
            kept = [saved["path"] for saved in caller.http.get("/v1/training/weights").json()["data"]]
            own = [path for path in kept if model in path]
            assert own == [path, f"longwave://{model}/weights/autosave"]  # the drain has saved what was live
            assert not any(live in path for path in kept)  # it had learnt nothing
