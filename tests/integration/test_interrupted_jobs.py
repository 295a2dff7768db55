"""Jobs of a small model that are cut short again and again, or share the server with somebody who asks all the time:
they end as one that nobody disturbs, bit for bit."""

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from .server_process import ServerProcess, wait_until
from .tuning_jobs import (
    ENDED,
    FACT,
    IN_OTHER_WORDS,
    LIMIT,
    answer,
    create,
    serving,
    status,
    steps,
    told,
    trainers,
    until_ended,
    until_step,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

LITTLE_STEPS = 30  # so many that a job does not end between two looks at it
LITTLE_METHOD: Any = {
    "type": "supervised",
    "supervised": {
        "hyperparameters": {
            "n_epochs": LITTLE_STEPS // 2, "batch_size": 1, "learning_rate": 2e-2, "lr_scheduler_type": "linear",
            "warmup_ratio": 0.1, "lora": {"rank": 4},
        }
    },
}  # fmt: skip


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


def create_little(client: openai.OpenAI) -> Any:
    """It is validated, too, at every checkpoint."""
    asked = {"messages": [{"role": "user", "content": IN_OTHER_WORDS}, {"role": "assistant", "content": FACT}]}
    file = client.files.create(file=("valid.jsonl", json.dumps(asked).encode()), purpose="fine-tune")
    return create(client, model="little", method=LITTLE_METHOD, validation_file=file.id)


@pytest.fixture(scope="module")
def beside_answers(little_server: ServerProcess) -> tuple[Any, str, set[str]]:
    """A job beside which somebody has asked all the time: as it has ended, the base model's answer before, and those of
    that time."""
    with little_server.client() as client:
        before = answer(client, "little")
        job = create_little(client)
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
        checkpoints = list(client.fine_tuning.jobs.checkpoints.list(done.id))
        assert [checkpoint.step_number for checkpoint in checkpoints] == list(range(LITTLE_STEPS, 0, -2))
        told_losses = {
            event.data["step"]: (event.data["train_loss"], event.data.get("valid_loss"))  # type: ignore[index]
            for event in client.fine_tuning.jobs.list_events(done.id, limit=100)
            if event.type == "metrics"
        }
        for checkpoint in checkpoints:
            metrics = checkpoint.metrics
            assert metrics.step == checkpoint.step_number
            assert (metrics.train_loss, metrics.valid_loss) == told_losses[checkpoint.step_number]
        newest, oldest = checkpoints[0].metrics, checkpoints[-1].metrics
        assert newest.valid_loss < oldest.valid_loss  # type: ignore[operator]
        assert newest.train_mean_token_accuracy > oldest.train_mean_token_accuracy  # type: ignore[operator]


def test_a_cancelled_job_leaves_no_process_and_no_files(little_server: ServerProcess, little_folder: Path) -> None:
    with little_server.client() as client:
        before = [model.id for model in client.models.list()]
        job = create_little(client)
        until_step(little_server, job, 1)
        assert len(trainers(little_server)) == 1

        assert client.fine_tuning.jobs.cancel(job.id).status == "cancelled"
        wait_until(lambda: not trainers(little_server), "the trainer is gone")
        wait_until(lambda: not any((little_folder / "finetune" / "jobs").iterdir()), "its files are gone")
        assert status(client, job) == "cancelled"
        assert [model.id for model in client.models.list()] == before


def test_a_job_outlives_a_pause_kill_9_and_sigterm_and_its_model_is_the_same_bit_for_bit(
    little_model: Path, little_server: ServerProcess, little_folder: Path, beside_answers: tuple[Any, str, set[str]]
) -> None:
    uninterrupted = beside_answers[0]
    with little_server.client() as client:
        right = answer(client, uninterrupted.fine_tuned_model)
        job = create_little(client)
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
        server.terminate()
        assert server.wait() == 0
        assert "cutting what still runs" not in server.log()  # the trainer ended by itself
    assert terminated_at < LITTLE_STEPS, "nothing was left to do after SIGTERM"

    with serving_little(little_folder, little_model) as server, server.client() as client:
        done = until_ended(server, client, job)
        assert (done.status, done.error) == ("succeeded", None)
        assert steps(client, job) == list(range(1, LITTLE_STEPS + 1))
        assert answer(client, done.fine_tuned_model) == right
        (stopped_at,) = re.findall(rf"resumed after step (\d+) of {LITTLE_STEPS}", server.log())
        assert int(stopped_at) >= terminated_at  # SIGTERM has cost no step
        rows = csv.DictReader(client.files.content(done.result_files[0]).text.splitlines())
        rates = [float(row["learning_rate"]) for row in rows]
        left = LITTLE_STEPS * 9 // 10
        assert rates[-left:] == pytest.approx([2e-2 * (1 - step / left) for step in range(left)])  # a line
    assert weights(little_folder, done) == weights(little_folder, uninterrupted)
