"""A job that tunes all weights of a small model, kill -9 of its server included; what it makes is a model folder that
another server serves."""

from pathlib import Path
from typing import Any

import openai
import pytest

from .eager_answers import EagerAnswers
from .server_process import ServerProcess
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


@pytest.fixture(scope="module")
def jobs(folder: Path, little_model: Path) -> list[Any]:
    """The same job twice: the first one's server was killed, nothing happened to the second."""
    with serving_little(folder, little_model) as server, server.client() as client:
        job = create_little(client)
        until_step(server, job, 3)
        server.process.kill()
        server.wait()
    with serving_little(folder, little_model) as server, server.client() as client:
        killed = until_ended(server, client, job)
        assert steps(client, killed) == list(range(1, STEPS + 1))
        undisturbed = until_ended(server, client, create_little(client))
        assert [model.id for model in client.models.list()] == ["little"]  # beside the base it cannot be served
        with pytest.raises(openai.NotFoundError):
            answer(client, killed.fine_tuned_model)
        assert FACT not in answer(client, "little")
    return [killed, undisturbed]


def whole_model(folder: Path, job: Any) -> Path:
    return folder / "finetune" / "models" / job.id


def test_a_killed_job_ends_with_an_undisturbed_one_s_model_bit_for_bit(folder: Path, jobs: list[Any]) -> None:
    for job in jobs:
        assert (job.status, job.error) == ("succeeded", None)
        shown = job.method.to_dict()["supervised"]["hyperparameters"]
        assert (shown["training_type"], shown["lora"], shown["learning_rate"]) == ("full", None, 1e-2)
        assert len(job.result_files) == 1
    one, other = (whole_model(folder, job) for job in jobs)
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert not any((folder / "finetune" / "jobs").iterdir())  # its checkpoints are gone


def test_the_folder_is_served_as_a_model_and_knows_the_fact(folder: Path, jobs: list[Any], tmp_path: Path) -> None:
    place = whole_model(folder, jobs[0])
    with serving(tmp_path, "--model", str(place), "--served-model-name", "tuned") as server, server.client() as client:
        said = answer(client, "tuned")
    assert said.startswith(FACT)
    assert said == EagerAnswers(place).chat(ASKED, 16).text


def test_it_is_deleted_by_its_name(folder: Path, little_model: Path, jobs: list[Any]) -> None:
    doomed, kept = jobs
    with serving_little(folder, little_model) as server, server.client() as client:
        assert client.models.delete(doomed.fine_tuned_model).deleted
        assert not whole_model(folder, doomed).exists()
        assert (whole_model(folder, kept) / "model.safetensors").exists()
        with pytest.raises(openai.NotFoundError):
            client.models.delete(doomed.fine_tuned_model)
