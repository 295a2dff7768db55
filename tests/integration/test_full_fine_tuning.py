"""A job that tunes all weights of a small model; what it makes is a model folder that another server serves."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from .eager_answers import EagerAnswers
from .server_process import ServerProcess, wait_until
from .tuning_jobs import ASKED, FACT, answer, create, serving, steps, until_ended, until_step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

STEPS = 12
METHOD: Any = {
    "type": "supervised",
    "supervised": {
        "hyperparameters": {"n_epochs": STEPS, "batch_size": 2, "learning_rate": 1e-2, "training_type": "full"}
    },
}


def serving_little(folder: Path, model: Path) -> ServerProcess:
    return serving(folder, str(model), "--served-model-name", "little")


def create_little(client: openai.OpenAI) -> Any:
    return create(client, model="little", method=METHOD)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("full-data")


@pytest.fixture(scope="module", params=["undisturbed", pytest.param("killed", marks=pytest.mark.thorough)])
def done(request: pytest.FixtureRequest, folder: Path, little_model: Path) -> Iterator[tuple[ServerProcess, Any]]:
    """A job as it has ended, and the server that has ended it. That a job goes on when its server was killed is shown
    in every run by test_interrupted_jobs, and of all weights, bit for bit, by unit/models/training/test_killed."""
    if request.param == "killed":
        with serving_little(folder, little_model) as server, server.client() as client:
            job = create_little(client)
            until_step(server, job, 3)
            server.process.kill()
            server.wait()
    with serving_little(folder, little_model) as server, server.client() as client:
        if request.param == "undisturbed":
            job = create_little(client)
        yield server, until_ended(server, client, job)


def whole_model(folder: Path, job: Any) -> Path:
    return folder / "finetune" / "models" / job.id


def test_a_job_ends_and_its_model_is_not_served_beside_the_base(folder: Path, done: tuple[ServerProcess, Any]) -> None:
    server, job = done
    assert (job.status, job.error) == ("succeeded", None)
    shown = job.method.to_dict()["supervised"]["hyperparameters"]
    assert (shown["training_type"], shown["lora"], shown["learning_rate"]) == ("full", None, 1e-2)
    assert len(job.result_files) == 1
    assert (whole_model(folder, job) / "model.safetensors").exists()
    wait_until(lambda: not any((folder / "finetune" / "jobs").iterdir()), "its checkpoints are gone")
    with server.client() as client:
        assert steps(client, job) == list(range(1, STEPS + 1))
        assert [model.id for model in client.models.list()] == ["little"]
        with pytest.raises(openai.NotFoundError):
            answer(client, job.fine_tuned_model)
        assert FACT not in answer(client, "little")


def test_the_folder_is_served_as_a_model_and_knows_the_fact(
    folder: Path, done: tuple[ServerProcess, Any], tmp_path: Path
) -> None:
    place = whole_model(folder, done[1])
    with serving(tmp_path, "--model", str(place), "--served-model-name", "tuned") as server, server.client() as client:
        said = answer(client, "tuned")
    assert said.startswith(FACT)
    assert said == EagerAnswers(place).chat(ASKED, 16).text


def test_it_is_deleted_by_its_name(folder: Path, done: tuple[ServerProcess, Any]) -> None:
    """The last test of this file."""
    server, job = done
    with server.client() as client:
        assert client.models.delete(job.fine_tuned_model).deleted
        assert not whole_model(folder, job).exists()
        with pytest.raises(openai.NotFoundError):
            client.models.delete(job.fine_tuned_model)
