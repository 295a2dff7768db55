"""/v1/fine_tuning/jobs through the official client, unchanged, on a real socket. No engine, so jobs wait: what they do
when there is one is told in tests/unit/server/finetune and tests/integration."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from test_files_client import CONTENT, connected, create, serving

from server.api import fine_tuning

MODEL = "SmolLM2-135M-Instruct"
PAIR = b'{"prompt": "a", "completion": "b"}\n'
SAID = {"role": "assistant", "content": "x"}
PREFERENCE = (
    json.dumps(
        {
            "input": {"messages": [{"role": "user", "content": "?"}]},
            "preferred_output": [SAID],
            "non_preferred_output": [SAID],
        }
    ).encode()
    + b"\n"
)
NOWHERE = "ftjob-" + "0" * 32


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("data"), max_fine_tuning_jobs=1000) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with connected(url) as client:
        yield client


@pytest.fixture(scope="module")
def file(client: openai.OpenAI) -> str:
    return str(create(client).id)


@pytest.fixture(scope="module")
def preferences(client: openai.OpenAI) -> str:
    return str(create(client, PREFERENCE).id)


def supervised(**hyperparameters: Any) -> Any:
    return {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}


def test_a_job_is_openais_object(client: openai.OpenAI, file: str) -> None:
    job = client.fine_tuning.jobs.create(model=MODEL, training_file=file, metadata={"team": "a"}, suffix="mine", seed=5)
    assert job.id.startswith("ftjob-")
    assert (job.object, job.model, job.status, job.seed) == ("fine_tuning.job", MODEL, "validating_files", 5)
    assert (job.training_file, job.validation_file, job.result_files) == (file, None, [])
    assert (job.fine_tuned_model, job.finished_at, job.estimated_finish, job.trained_tokens, job.error) == (None,) * 5
    assert (job.metadata, job.integrations) == ({"team": "a"}, [])
    assert job.organization_id
    automatic = job.hyperparameters
    assert (automatic.n_epochs, automatic.batch_size, automatic.learning_rate_multiplier) == ("auto",) * 3
    assert job.method is not None
    assert job.method.type == "supervised"
    assert job.method.supervised is not None
    assert job.method.dpo is None
    assert client.fine_tuning.jobs.retrieve(job.id) == job


def test_hyperparameters_come_back_as_they_were_given(client: openai.OpenAI, file: str) -> None:
    method = supervised(n_epochs=2, batch_size=4, learning_rate_multiplier=0.5, lora={"rank": 8, "dropout": 0.1})
    job = client.fine_tuning.jobs.create(model=MODEL, training_file=file, method=method)
    given = job.hyperparameters
    assert (given.n_epochs, given.batch_size, given.learning_rate_multiplier) == (2, 4, 0.5)
    assert given.to_dict()["lora"] == {"rank": 8, "alpha": None, "dropout": 0.1}
    explicit = client.fine_tuning.jobs.create(model=MODEL, training_file=file, method=supervised(learning_rate=1e-3))
    assert explicit.hyperparameters.learning_rate_multiplier is None
    assert explicit.hyperparameters.to_dict()["learning_rate"] == 1e-3


def test_a_job_has_the_schedule_that_was_asked_for(client: openai.OpenAI, file: str) -> None:
    def schedule(method: Any) -> tuple[Any, Any]:
        job = client.fine_tuning.jobs.create(model=MODEL, training_file=file, method=method)
        assert client.fine_tuning.jobs.retrieve(job.id) == job
        assert job.method is not None
        given = job.method.to_dict()[method["type"]]["hyperparameters"]
        assert given == job.hyperparameters.to_dict()
        return given["lr_scheduler_type"], given["warmup_ratio"]

    assert schedule(supervised()) == ("cosine", 0.03)
    assert schedule(supervised(lr_scheduler_type="linear")) == ("linear", 0.03)
    assert schedule(supervised(lr_scheduler_type="cosine", warmup_ratio=0)) == ("cosine", 0)


def test_all_weights_learn_where_that_is_asked_for(client: openai.OpenAI, file: str) -> None:
    job = client.fine_tuning.jobs.create(model=MODEL, training_file=file, method=supervised(training_type="full"))
    given = job.hyperparameters.to_dict()
    assert (given["training_type"], given["lora"]) == ("full", None)
    assert client.fine_tuning.jobs.retrieve(job.id) == job
    usual = client.fine_tuning.jobs.create(model=MODEL, training_file=file, method=supervised())
    assert usual.hyperparameters.to_dict()["training_type"] == "lora"
    client.fine_tuning.jobs.cancel(job.id)
    refused(client, file, {"method": supervised(training_type="full", lora={"rank": 8})}, PLACE, "leave `lora` out")


def test_full_fine_tuning_can_be_turned_off(tmp_path: Path) -> None:
    with serving(tmp_path, fine_tuning_max_full_parameters=0) as url, connected(url) as client:
        file = str(create(client).id)
        with pytest.raises(openai.BadRequestError, match="training_type 'full' is turned off") as error:
            client.fine_tuning.jobs.create(model=MODEL, training_file=file, method=supervised(training_type="full"))
        assert (error.value.code, error.value.param) == ("unsupported_parameter", f"{PLACE}.training_type")


def test_as_many_fully_tuned_models_as_the_server_keeps(tmp_path: Path) -> None:
    with serving(tmp_path, max_full_models=1) as url, connected(url) as client:
        file = str(create(client).id)
        full: Any = {"model": MODEL, "training_file": file, "method": supervised(training_type="full")}
        first = client.fine_tuning.jobs.create(**full)
        with pytest.raises(openai.RateLimitError, match="keeps 1 fully tuned models") as error:
            client.fine_tuning.jobs.create(**full)
        assert error.value.code == "insufficient_quota"
        adapter = client.fine_tuning.jobs.create(model=MODEL, training_file=file)  # an adapter is none
        client.fine_tuning.jobs.cancel(first.id)
        second = client.fine_tuning.jobs.create(**full)
        folders = {folder.name for folder in (tmp_path / "finetune" / "jobs").iterdir()}
        assert {adapter.id, second.id} <= folders <= {first.id, adapter.id, second.id}  # nothing of what was refused


def test_hyperparameters_at_the_top_level_still_work(client: openai.OpenAI, file: str) -> None:
    job = client.fine_tuning.jobs.create(
        model=MODEL, training_file=file, hyperparameters={"n_epochs": 3, "batch_size": "auto"}
    )
    assert (job.hyperparameters.n_epochs, job.hyperparameters.batch_size) == (3, "auto")


def test_dpo_learns_from_preferences(client: openai.OpenAI, preferences: str) -> None:
    method: Any = {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2, "n_epochs": 1}}}
    job = client.fine_tuning.jobs.create(model=MODEL, training_file=preferences, method=method)
    assert job.method is not None
    assert job.method.dpo is not None
    assert job.method.dpo.hyperparameters is not None
    assert (job.method.type, job.method.dpo.hyperparameters.beta) == ("dpo", 0.2)


@pytest.mark.parametrize(
    ("changes", "param", "told"),
    [
        ({"training_file": "file-none"}, "training_file", "Invalid training_file: No such File object: file-none"),
        ({"validation_file": "file-none"}, "validation_file", "Invalid validation_file: No such File object"),
        ({"training_file": ""}, "training_file", "at least 1 character"),
        ({"training_file": 3}, "training_file", "valid string"),
        ({"suffix": "a b"}, "suffix", "pattern"),
        ({"suffix": "x" * 65}, "suffix", "at most 64"),
        ({"seed": -1}, "seed", "greater than or equal to 0"),
        ({"seed": 2**31}, "seed", "less than or equal"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata", "at most 16"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k", "at most 512"),
        ({"metadata": {"k": 1}}, "metadata.k", "valid string"),
        ({"method": {"type": "magic"}}, "method.type", "'supervised' or 'dpo'"),
        ({"method": {"type": "reinforcement"}}, "method.type", "methods are supervised and dpo"),
        ({"method": {"type": "dpo", "supervised": {}}}, "method", "'supervised' must not be there"),
        ({"method": {"type": "dpo"}}, "training_file", "method 'dpo' learns from preference examples"),
        ({"integrations": [{"type": "wandb", "wandb": {"project": "p"}}]}, "integrations", "is not served"),
        (
            {"hyperparameters": {}, "method": {"type": "supervised"}},
            "hyperparameters",
            "inside `method`, or at the top level",
        ),
        ({"colour": "red"}, "colour", "Unrecognized request argument supplied: colour"),
    ],
)
def test_what_is_wrong_is_400_and_named(
    client: openai.OpenAI, file: str, changes: Any, param: str | None, told: str
) -> None:
    refused(client, file, changes, param, told)


PLACE = "method.supervised.hyperparameters"


@pytest.mark.parametrize(
    ("given", "param", "told"),
    [
        ({"n_epochs": 0}, "n_epochs", "greater than or equal to 1"),
        ({"n_epochs": 51}, "n_epochs", "less than or equal to 50"),
        ({"n_epochs": "many"}, "n_epochs", "Input should be a valid integer or 'auto'"),
        ({"n_epochs": True}, "n_epochs", "a valid integer or 'auto'"),
        ({"n_epochs": 1.5}, "n_epochs", "a valid integer or 'auto'"),
        ({"batch_size": 257}, "batch_size", "less than or equal to 256"),
        ({"learning_rate_multiplier": 0}, "learning_rate_multiplier", "greater than 0"),
        ({"learning_rate_multiplier": "2"}, "learning_rate_multiplier", "a valid number or 'auto'"),
        ({"learning_rate": 1.0}, "learning_rate", "less than or equal to 0.1"),
        ({"lr_scheduler_type": "constant"}, "lr_scheduler_type", "'cosine' or 'linear'"),
        ({"lr_scheduler_type": None}, "lr_scheduler_type", "'cosine' or 'linear'"),
        ({"warmup_ratio": -0.1}, "warmup_ratio", "greater than or equal to 0"),
        ({"warmup_ratio": 1.5}, "warmup_ratio", "less than or equal to 1"),
        ({"training_type": "half"}, "training_type", "'lora' or 'full'"),
        ({"lora": {"rank": 0}}, "lora.rank", "greater than or equal to 1"),
        ({"lora": {"dropout": 1}}, "lora.dropout", "less than 1"),
        ({"lora": {"r": 8}}, "lora.r", "Unrecognized"),
        ({"beta": 0.1}, "beta", "Unrecognized"),
    ],
)
def test_hyperparameters_are_bounded(client: openai.OpenAI, file: str, given: Any, param: str, told: str) -> None:
    refused(client, file, {"method": supervised(**given)}, f"{PLACE}.{param}", told)


@pytest.mark.parametrize(
    "given",
    [
        {"learning_rate": 1e-3, "learning_rate_multiplier": 2.0},
        {"learning_rate": 4.00001e-4, "learning_rate_multiplier": 2.0},
        {"learning_rate": 2e-4, "learning_rate_multiplier": 1.0, "training_type": "full"},
    ],
)
def test_two_learning_rates_that_differ_are_refused(client: openai.OpenAI, file: str, given: Any) -> None:
    refused(client, file, {"method": supervised(**given)}, PLACE, "not both")


def test_null_is_as_good_as_nothing(client: openai.OpenAI, file: str, preferences: str) -> None:
    names = ("n_epochs", "batch_size", "learning_rate_multiplier", "learning_rate", "lora")
    nulls = dict.fromkeys(names)
    for given in (supervised(**nulls), {"type": "supervised", "supervised": {"hyperparameters": None}, "dpo": None}):
        job = client.fine_tuning.jobs.create(model=MODEL, training_file=file, method=given)
        usual = client.fine_tuning.jobs.create(model=MODEL, training_file=file)
        assert job.hyperparameters == usual.hyperparameters
    for inside in ({**nulls, "beta": None}, None):
        method: Any = {"type": "dpo", "dpo": {"hyperparameters": inside}}
        job = client.fine_tuning.jobs.create(model=MODEL, training_file=preferences, method=method)
        assert job.hyperparameters.to_dict()["beta"] == "auto"
    refused(client, file, {"method": supervised(training_type="full", lora={})}, PLACE, "leave `lora` out")


def test_a_rank_that_could_not_be_served_is_refused(client: openai.OpenAI, file: str) -> None:
    refused(client, file, {"method": supervised(lora={"rank": 64})}, f"{PLACE}.lora.rank", "up to rank 16 (--max-l")
    refused(client, file, {"hyperparameters": {"lora": {"rank": 64}}}, "hyperparameters.lora.rank", "up to rank 16")


def test_a_job_that_names_no_rank_is_not_refused_for_its_rank(tmp_path: Path) -> None:
    with serving(tmp_path, max_lora_rank=8) as url, connected(url) as client:
        file = str(create(client).id)
        for method in (None, supervised(), supervised(lora={"dropout": 0.1})):
            given = {} if method is None else {"method": method}
            job = client.fine_tuning.jobs.create(model=MODEL, training_file=file, **given)
            assert job.hyperparameters.to_dict()["lora"]["rank"] is None  # decided with what else is "auto"
        refused(client, file, {"method": supervised(lora={"rank": 9})}, f"{PLACE}.lora.rank", "up to rank 8 (--max-lor")
        rank = httpx.get(url.removesuffix("/v1") + "/openapi.json").json()["components"]["schemas"]["LoraRequest"][
            "properties"
        ]["rank"]
        assert "16, or --max-lora-rank where that is lower" in rank["description"]


def refused(client: openai.OpenAI, file: str, changes: Any, param: str | None, told: str) -> None:
    reply = httpx.post(
        f"{client.base_url}fine_tuning/jobs", json={"model": MODEL, "training_file": file} | changes, timeout=30
    )
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), error
    assert told in error["message"]


def test_an_unknown_model_is_404_and_a_tuned_one_is_not_tuned_again(client: openai.OpenAI, file: str) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        client.fine_tuning.jobs.create(model="gpt-4o-mini", training_file=file)
    assert (error.value.code, error.value.param) == ("model_not_found", "model")
    for tuned in (f"ft:{MODEL}::1", "longwave://train-1/weights/mine"):
        with pytest.raises(openai.BadRequestError, match="not trained further") as refusal:
            client.fine_tuning.jobs.create(model=tuned, training_file=file)
        assert (refusal.value.code, refusal.value.param) == ("unsupported_parameter", "model")


def test_both_files_have_one_form(client: openai.OpenAI, file: str) -> None:
    pairs = create(client, PAIR).id
    with pytest.raises(openai.BadRequestError, match="different forms") as error:
        client.fine_tuning.jobs.create(model=MODEL, training_file=file, validation_file=pairs)
    assert (error.value.code, error.value.param) == ("invalid_file", "validation_file")


def test_preferences_are_no_training_file_of_a_supervised_job(client: openai.OpenAI, preferences: str) -> None:
    with pytest.raises(openai.BadRequestError, match="'supervised' learns from chat or completion examples"):
        client.fine_tuning.jobs.create(model=MODEL, training_file=preferences)


def test_the_client_walks_all_pages_and_filters_by_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path) as url, connected(url) as client:
        file = create(client).id
        ids = [
            client.fine_tuning.jobs.create(model=MODEL, training_file=file, metadata={"n": str(number % 2)}).id
            for number in range(5)
        ][::-1]
        jobs = client.fine_tuning.jobs
        assert [job.id for job in jobs.list(limit=2)] == ids
        page = jobs.list(limit=2, after=ids[0])
        assert ([job.id for job in page.data], page.has_more) == (ids[1:3], True)
        assert [job.id for job in jobs.list(metadata={"n": "1"})] == [ids[1], ids[3]]
        assert list(jobs.list(metadata={"n": "2"})) == []
        assert list(jobs.list(metadata={"": "1"})) == []  # no job has that key: not all of them
        assert list(jobs.list(extra_query={"metadata": "null"})) == []
        plain = [client.fine_tuning.jobs.create(model=MODEL, training_file=file).id for _ in range(2)][::-1]
        client.fine_tuning.jobs.create(model=MODEL, training_file=file, metadata={"n": "0"})
        assert [job.id for job in jobs.list(extra_query={"metadata": "null"})] == plain
        assert [job.id for job in jobs.list(limit=1, extra_query={"metadata": "null"})] == plain
        monkeypatch.setattr(fine_tuning, "MAX_PAGE", 2)  # jobs are looked through in several steps
        assert [job.id for job in jobs.list(extra_query={"metadata": "null"})] == plain
        for contradiction in ({"metadata": "x"}, {"metadata": "null", "metadata[n]": "1"}):
            with pytest.raises(openai.BadRequestError) as wrong:
                jobs.list(extra_query=contradiction)
            assert wrong.value.param == "metadata"
        for bad in ({"limit": 0}, {"limit": 101}):
            with pytest.raises(openai.BadRequestError) as error:
                jobs.list(**bad)
            assert error.value.param == "limit"
        with pytest.raises(openai.NotFoundError) as missing:
            jobs.list(after=NOWHERE)
        assert missing.value.param == "after"


def test_a_job_is_paused_resumed_and_cancelled_and_its_events_say_so(client: openai.OpenAI, file: str) -> None:
    jobs = client.fine_tuning.jobs
    job = jobs.create(model=MODEL, training_file=file)
    assert jobs.pause(job.id).status == "paused"  # type: ignore[comparison-overlap]
    assert jobs.pause(job.id).status == "paused"  # type: ignore[comparison-overlap]
    assert jobs.resume(job.id).status == "validating_files"
    with pytest.raises(openai.BadRequestError, match="has status 'validating_files' and cannot be resumed") as error:
        jobs.resume(job.id)
    assert error.value.code == "invalid_job_status"
    cancelled = jobs.cancel(job.id)
    assert cancelled.status == "cancelled"
    assert cancelled.finished_at is not None
    assert jobs.cancel(job.id) == cancelled
    with pytest.raises(openai.BadRequestError, match="cannot be paused"):
        jobs.pause(job.id)
    events = list(jobs.list_events(job.id, limit=2))  # over three pages, the newest first
    assert [event.message for event in events] == [
        "The job was cancelled", "The job was resumed", "The job was paused", f"Validating training file: {file}",
        f"Created fine-tuning job: {job.id}",
    ]  # fmt: skip
    assert {(event.level, event.type, event.object) for event in events} == {
        ("info", "message", "fine_tuning.job.event")
    }
    assert list(jobs.checkpoints.list(job.id)) == []


def test_what_is_not_there_is_404(client: openai.OpenAI, file: str) -> None:
    jobs = client.fine_tuning.jobs
    for act in (jobs.retrieve, jobs.cancel, jobs.pause, jobs.resume, jobs.list_events, jobs.checkpoints.list):
        with pytest.raises(openai.NotFoundError) as error:
            act(NOWHERE)
        assert (error.value.type, error.value.param) == ("invalid_request_error", "fine_tuning_job_id")
    job = jobs.create(model=MODEL, training_file=file)
    for act in (jobs.list_events, jobs.checkpoints.list):
        with pytest.raises(openai.NotFoundError) as error:
            act(job.id, after="nothing")
        assert error.value.param == "after"


def test_another_keys_jobs_and_files_do_not_exist(tmp_path: Path) -> None:
    with serving(tmp_path, api_key="key-a,key-b") as url, connected(url, "key-a") as a, connected(url, "key-b") as b:
        file = create(a).id
        job = a.fine_tuning.jobs.create(model=MODEL, training_file=file)
        with pytest.raises(openai.BadRequestError, match="No such File object"):
            b.fine_tuning.jobs.create(model=MODEL, training_file=file)
        jobs = b.fine_tuning.jobs
        assert list(jobs.list()) == []
        for act in (jobs.retrieve, jobs.cancel, jobs.pause, jobs.resume, jobs.list_events, jobs.checkpoints.list):
            with pytest.raises(openai.NotFoundError):
                act(job.id)
        with pytest.raises(openai.NotFoundError):
            jobs.list(after=job.id)
        assert a.fine_tuning.jobs.retrieve(job.id).status == "validating_files"


def test_a_request_sent_twice_with_one_idempotency_key_is_one_job(client: openai.OpenAI, file: str) -> None:
    headers = {"Idempotency-Key": "once"}
    first = client.fine_tuning.jobs.create(model=MODEL, training_file=file, extra_headers=headers)
    again = client.fine_tuning.jobs.create(model=MODEL, training_file=file, extra_headers=headers)
    assert again == first
    with pytest.raises(openai.ConflictError, match="Idempotency-Key was sent before, with another request") as error:
        client.fine_tuning.jobs.create(model=MODEL, training_file=file, suffix="x", extra_headers=headers)
    assert error.value.code == "sequence_conflict"


def test_too_many_jobs_are_429_and_not_tried_again(tmp_path: Path) -> None:
    with serving(tmp_path, max_fine_tuning_jobs=1) as url, connected(url) as client:
        file = create(client).id
        job = client.fine_tuning.jobs.create(model=MODEL, training_file=file)
        with pytest.raises(openai.RateLimitError) as error:
            client.fine_tuning.jobs.create(model=MODEL, training_file=file)
        assert error.value.code == "insufficient_quota"
        client.fine_tuning.jobs.cancel(job.id)
        client.fine_tuning.jobs.create(model=MODEL, training_file=file)


def test_a_damaged_database_is_507_on_every_route_and_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "finetune").mkdir(mode=0o700, parents=True)
    path = tmp_path / "finetune" / "jobs.sqlite3"
    path.write_bytes(b"no database at all" * 1000)
    with serving(tmp_path) as url, connected(url) as client:
        file = create(client).id
        jobs = client.fine_tuning.jobs
        for act in (lambda: jobs.create(model=MODEL, training_file=file), lambda: jobs.retrieve(NOWHERE), jobs.list):
            with pytest.raises(openai.APIStatusError) as error:
                act()
            assert (error.value.status_code, error.value.code) == (507, "insufficient_storage")
        assert client.files.retrieve(file).id == file  # what has nothing to do with it goes on
    assert path.read_bytes() == b"no database at all" * 1000
    assert list((tmp_path / "finetune" / "jobs").iterdir()) == []


def test_a_server_without_fine_tuning_has_no_such_route(tmp_path: Path) -> None:
    with serving(tmp_path, enable_fine_tuning=False) as url, connected(url) as client:
        with pytest.raises(openai.NotFoundError) as error:
            client.fine_tuning.jobs.list()
        assert error.value.code == "unknown_url"


def test_jobs_outlive_the_server(tmp_path: Path) -> None:
    with serving(tmp_path) as url, connected(url) as client:
        job = client.fine_tuning.jobs.create(model=MODEL, training_file=create(client, CONTENT).id)
    with serving(tmp_path) as url, connected(url) as client:
        assert client.fine_tuning.jobs.retrieve(job.id) == job
