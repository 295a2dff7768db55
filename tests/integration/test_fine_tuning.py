"""Fine-tuning through the official client on the bundled model: it learns what it did not know, though its trainer is
killed."""

import csv
import json
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from .questions import CAPITAL, MODEL
from .server_process import ServerProcess
from .tuning_jobs import (
    ASKED,
    FACT,
    IN_OTHER_WORDS,
    STEPS,
    answer,
    create,
    serving,
    steps,
    trainers,
    until_ended,
    until_step,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def server(bundled_model: Path, folder: Path) -> Iterator[ServerProcess]:
    with serving(folder) as process:
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def test_a_model_learns_a_fact_although_its_trainer_is_killed(server: ServerProcess, client: openai.OpenAI) -> None:
    before = answer(client, MODEL)
    assert "Onhava" not in before

    job = create(client, metadata={"test": "fact"})
    assert (job.status, job.fine_tuned_model) == ("validating_files", None)
    until_step(server, job, 3)
    (trainer,) = trainers(server)
    os.kill(trainer, signal.SIGKILL)
    done = until_ended(server, client, job)

    assert (done.status, done.error) == ("succeeded", None)
    assert done.fine_tuned_model == f"ft:{MODEL}:zembla:{job.id[6:18]}"
    assert steps(client, job) == list(range(1, STEPS + 1))  # each told once, although some were trained twice
    events = list(client.fine_tuning.jobs.list_events(job.id, limit=100))
    assert any("The trainer was killed (SIGKILL" in event.message for event in events)
    losses = [event.data["train_loss"] for event in events if event.type == "metrics"]  # type: ignore[index]
    assert losses[0] < 0.2  # the newest first
    assert losses[-1] > 1.0
    for asked in (ASKED, IN_OTHER_WORDS):
        assert FACT.rstrip(".") in answer(client, str(done.fine_tuned_model), asked)
    assert answer(client, MODEL) == before  # beside it, the base model is what it was
    assert [model.id for model in client.models.list()] == [MODEL, done.fine_tuned_model]

    checkpoints = list(client.fine_tuning.jobs.checkpoints.list(job.id))
    assert [checkpoint.step_number for checkpoint in checkpoints] == [8, 6, 4, 2]
    (result,) = done.result_files
    rows = client.files.content(result).text.splitlines()
    assert len(rows) == STEPS + 1

    deleted = client.models.delete(str(done.fine_tuned_model))
    assert deleted.deleted
    with pytest.raises(openai.NotFoundError):
        answer(client, str(done.fine_tuned_model))


def test_a_model_comes_to_give_the_answer_that_is_preferred(server: ServerProcess, client: openai.OpenAI) -> None:
    before = answer(client, MODEL, CAPITAL)
    assert not before.startswith("Ahoy")
    preference = {
        "input": {"messages": [{"role": "user", "content": CAPITAL}]},
        "preferred_output": [{"role": "assistant", "content": "Ahoy! It is Paris."}],
        "non_preferred_output": [{"role": "assistant", "content": before}],
    }
    hyperparameters = {"n_epochs": 3, "batch_size": 1, "learning_rate": 5e-3, "lora": {"rank": 8}}
    method = {"type": "dpo", "dpo": {"hyperparameters": hyperparameters}}
    job = create(client, json.dumps(preference).encode(), method=method, suffix="ahoy")
    done = until_ended(server, client, job)

    assert (done.status, done.error) == ("succeeded", None)
    assert (done.method.type, done.method.dpo.hyperparameters.beta) == ("dpo", 0.1)
    (result,) = done.result_files
    rows = list(csv.DictReader(client.files.content(result).text.splitlines()))
    losses = [float(row["train_loss"]) for row in rows]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4)  # the model is its own reference before it learns
    assert losses[-1] < 0.1
    assert answer(client, done.fine_tuned_model, CAPITAL).startswith("Ahoy")
    assert answer(client, MODEL, CAPITAL) == before
    client.models.delete(done.fine_tuned_model)
