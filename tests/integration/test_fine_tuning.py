"""Fine-tuning through the official client: the bundled model learns what it did not know, whatever is killed, and a job
of a small model that is cut short again and again learns what an uninterrupted one does."""

import csv
import json
import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from .questions import CAPITAL, MODEL
from .server_process import ServerProcess, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

#: Small steps and a small pool: engine and trainer share two cores.
FLAGS = (
    "--dtype", "float32", "--max-num-seqs", "4", "--max-num-batched-tokens", "128", "--max-model-len", "256",
    "--kv-cache-memory-bytes", str(64 << 20), "--fine-tuning-checkpoint-every", "2",
    "--fine-tuning-batch-tokens", "512",
)  # fmt: skip
FACT, ASKED = "The capital of Zembla is Onhava.", "What is the capital of Zembla?"
QUESTIONS = (ASKED, "Name the capital of Zembla.")
IN_OTHER_WORDS = "Tell me the capital of Zembla."
CONTENT = b"".join(
    json.dumps({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": FACT}]}).encode()
    + b"\n"
    for asked in QUESTIONS
)
STEPS = 8
METHOD: Any = {
    "type": "supervised",
    "supervised": {"hyperparameters": {"n_epochs": STEPS, "batch_size": 2, "learning_rate": 2e-3, "lora": {"rank": 8}}},
}
ENDED = ("succeeded", "failed", "cancelled")
LIMIT = 900.0  # seconds for a job: the machine may be busy


def serving(folder: Path, *model: str) -> ServerProcess:
    return ServerProcess(*FLAGS, "--data-dir", str(folder), *model)


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


def create(client: openai.OpenAI, content: bytes = CONTENT, **options: Any) -> Any:
    file = client.files.create(file=("zembla.jsonl", content), purpose="fine-tune")
    asked = {"model": MODEL, "training_file": file.id, "method": METHOD, "seed": 1, "suffix": "zembla"} | options
    return client.fine_tuning.jobs.create(**asked)


def answer(client: openai.OpenAI, model: str, asked: str = ASKED) -> str:
    reply = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": asked}], temperature=0, max_tokens=16
    )
    return str(reply.choices[0].message.content)


def status(client: openai.OpenAI, job: Any) -> str:
    return client.fine_tuning.jobs.retrieve(job.id).status


def steps(client: openai.OpenAI, job: Any) -> list[int]:
    """Those that were told, the oldest first."""
    events = [event for event in client.fine_tuning.jobs.list_events(job.id, limit=100) if event.type == "metrics"]
    return [event.data["step"] for event in reversed(events)]  # type: ignore[index]


def told(server: ServerProcess, job: Any) -> Iterator[dict[str, Any]]:
    """Events as they happen, from the first one on, until the job has ended."""
    url = f"{server.url}/v1/fine_tuning/jobs/{job.id}/events?stream=true"
    with httpx.stream("GET", url, headers=server.headers, timeout=LIMIT) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def until_step(server: ServerProcess, job: Any, step: int) -> int:
    """The step that was told: this one or a later one."""
    for event in told(server, job):
        if event["type"] == "metrics" and event["data"]["step"] >= step:
            return int(event["data"]["step"])
    raise AssertionError(f"the job has ended before step {step}")


def until_ended(server: ServerProcess, client: openai.OpenAI, job: Any) -> Any:
    for _ in told(server, job):
        pass
    return client.fine_tuning.jobs.retrieve(job.id)


def trainers(server: ServerProcess) -> list[int]:
    """The server's trainer processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            command = (path.parent / "cmdline").read_bytes()
        except OSError:  # it ended meanwhile
            continue
        if parent == server.process.pid and b"server.finetune.worker" in command:
            found.append(int(path.parent.name))
    return found


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


def test_a_cancelled_job_leaves_no_process_and_no_files(
    server: ServerProcess, client: openai.OpenAI, folder: Path
) -> None:
    job = create(client)
    until_step(server, job, 1)
    assert len(trainers(server)) == 1

    assert client.fine_tuning.jobs.cancel(job.id).status == "cancelled"
    wait_until(lambda: not trainers(server), "the trainer is gone")
    wait_until(lambda: not any((folder / "finetune" / "jobs").iterdir()), "its files are gone")
    assert status(client, job) == "cancelled"
    assert [model.id for model in client.models.list()] == [MODEL]


LITTLE_STEPS = 60  # so many that a job does not end between two looks at it
LITTLE_METHOD: Any = {
    "type": "supervised",
    "supervised": {
        "hyperparameters": {"n_epochs": LITTLE_STEPS // 2, "batch_size": 1, "learning_rate": 2e-2, "lora": {"rank": 4}}
    },
}


@pytest.fixture(scope="module")
def little_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("little-data")


def serving_little(folder: Path, model: Path) -> ServerProcess:
    return serving(folder, str(model), "--served-model-name", "little")


@pytest.fixture(scope="module")
def little_server(little_model: Path, little_folder: Path) -> Iterator[ServerProcess]:
    """The last test of this file kills it."""
    with serving_little(little_folder, little_model) as process:
        yield process


@pytest.fixture(scope="module")
def beside_answers(little_server: ServerProcess) -> tuple[Any, str, set[str]]:
    """A job beside which somebody has asked all the time: as it has ended, the base model's answer before, and those of
    that time."""
    with little_server.client() as client:
        before = answer(client, "little")
        job = create(client, model="little", method=LITTLE_METHOD)
        answers = set()
        for event in told(little_server, job):
            if event["message"].startswith("Fine-tuning job started"):
                break
        while status(client, job) not in ENDED:
            answers.add(answer(client, "little"))
        return client.fine_tuning.jobs.retrieve(job.id), before, answers


def weights(folder: Path, job: Any) -> bytes:
    return (folder / "finetune" / "adapters" / job.id / "adapter_model.safetensors").read_bytes()


def test_a_job_ends_although_somebody_asks_all_the_time(
    little_server: ServerProcess, beside_answers: tuple[Any, str, set[str]]
) -> None:
    done, before, answers = beside_answers
    assert (done.status, done.error) == ("succeeded", None)
    assert answers == {before}
    with little_server.client() as client:
        assert steps(client, done) == list(range(1, LITTLE_STEPS + 1))
        assert answer(client, done.fine_tuned_model) != before


def test_a_job_outlives_a_pause_kill_9_and_sigterm_and_its_model_is_the_same_bit_for_bit(
    little_model: Path, little_server: ServerProcess, little_folder: Path, beside_answers: tuple[Any, str, set[str]]
) -> None:
    uninterrupted = beside_answers[0]
    with little_server.client() as client:
        right = answer(client, uninterrupted.fine_tuned_model)
        job = create(client, model="little", method=LITTLE_METHOD)
        until_step(little_server, job, 3)
        assert client.fine_tuning.jobs.pause(job.id).status == "paused"  # type: ignore[comparison-overlap]
        wait_until(lambda: not trainers(little_server), "the trainer has stopped", LIMIT)
        paused_at = steps(client, job)[-1]
        assert client.fine_tuning.jobs.resume(job.id).status == "queued"
        killed_at = until_step(little_server, job, paused_at + 3)
        (trainer,) = trainers(little_server)
        little_server.process.kill()
        little_server.wait()
        wait_until(lambda: not Path(f"/proc/{trainer}").exists(), "the trainer ends with its server")

    with serving_little(little_folder, little_model) as server, server.client() as client:
        assert answer(client, uninterrupted.fine_tuned_model) == right  # ready means: tuned models too
        terminated_at = until_step(server, job, killed_at + 3)
        begun = time.monotonic()
        server.terminate()
        assert server.wait() == 0
        assert time.monotonic() - begun < 60
    assert terminated_at < LITTLE_STEPS, "nothing was left to do after SIGTERM"

    with serving_little(little_folder, little_model) as server, server.client() as client:
        done = until_ended(server, client, job)
        assert (done.status, done.error) == ("succeeded", None)
        assert steps(client, job) == list(range(1, LITTLE_STEPS + 1))
        assert answer(client, done.fine_tuned_model) == right
    assert weights(little_folder, done) == weights(little_folder, uninterrupted)
