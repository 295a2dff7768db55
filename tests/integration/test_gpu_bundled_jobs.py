"""The bundled model on a GPU, all in bfloat16, learns what it did not know: by an adapter that answers beside it, and
whole. Runs on a CPU with LONGWAVE_JOB_TESTS_ON_CPU=1."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from .questions import CAPITAL, MODEL
from .server_process import ServerProcess
from .tuning_jobs import ASKED, FACT, IN_OTHER_WORDS, answer, create, serving, until_ended

ON_CPU = os.environ.get("LONGWAVE_JOB_TESTS_ON_CPU") == "1"
pytestmark = [pytest.mark.slow if ON_CPU else pytest.mark.gpu, pytest.mark.timeout(1200 if ON_CPU else 300)]

FLAGS = ("--dtype", "float32" if ON_CPU else "bfloat16")
STEPS = 8 if ON_CPU else 24


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def serving_it(data: Path, *flags: str) -> ServerProcess:
    often = ("--fine-tuning-checkpoint-every", str(STEPS))
    return serving(data, *FLAGS, *often, *flags, device="cpu" if ON_CPU else "cuda")


@pytest.fixture(scope="module")
def server(bundled_model: Path, data: Path) -> Iterator[ServerProcess]:
    with serving_it(data) as process:
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def taught(server: ServerProcess, client: openai.OpenAI, **hyperparameters: Any) -> Any:
    chosen = {"n_epochs": STEPS, "batch_size": 2, **hyperparameters}
    job = create(client, method={"type": "supervised", "supervised": {"hyperparameters": chosen}})
    done = until_ended(server, client, job)
    assert (done.status, done.error) == ("succeeded", None)
    return done


def test_an_adapter_learns_a_fact_and_answers_in_one_batch_with_the_base_model(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    assert "Onhava" not in answer(client, MODEL)
    tuned = str(taught(server, client, learning_rate=2e-3, lora={"rank": 8}).fine_tuned_model)
    pairs = [(tuned, ASKED), (MODEL, ASKED), (tuned, IN_OTHER_WORDS), (MODEL, CAPITAL)]
    with ThreadPoolExecutor(len(pairs)) as pool:
        said = list(pool.map(lambda pair: answer(client, *pair), pairs))
    assert all(FACT.rstrip(".") in text for text in (said[0], said[2])), said
    assert "Onhava" not in said[1]
    assert "Paris" in said[3]
    assert client.models.delete(tuned).deleted
    with pytest.raises(openai.NotFoundError):
        answer(client, tuned)


def test_a_whole_model_learns_it_and_another_server_serves_it(
    server: ServerProcess, client: openai.OpenAI, data: Path, tmp_path: Path
) -> None:
    done = taught(server, client, training_type="full", learning_rate=2e-4)
    assert "Onhava" not in answer(client, MODEL)
    folder = data / "finetune" / "models" / done.id
    with (
        serving_it(tmp_path, str(folder), "--served-model-name", "tuned") as other,
        other.client() as asking,
    ):
        assert FACT.rstrip(".") in answer(asking, "tuned")
