"""What "auto" becomes, and what a plan says."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from job_makers import REQUEST

from models.training import TrainingPlan
from server.finetune.config import TrainerConfig
from server.finetune.hyperparameters import TooManyStepsError, auto_batch_size, auto_epochs, make_plan, total_steps
from server.finetune.messages import Validated
from server.finetune.records import Hyperparameters, Job, JobRequest, Method, Status
from server.schemas.fine_tuning import FineTuningJobRequest
from server.schemas.fine_tuning_reply import FineTuningJob
from server.training.config import TrainingConfig


def plan(
    examples: int = 10, longest: int = 50, request: JobRequest = REQUEST, default_rank: int = 16, **asked: float | str
) -> TrainingPlan:
    files = Validated(examples, 0, examples * 10, longest)
    asking = replace(request, hyperparameters=Hyperparameters(**asked))  # type: ignore[arg-type]
    return make_plan(
        asking, "base", 3, files, checkpoint_every=10, micro_batch_tokens=4096, default_rank=default_rank,
        max_model_len=100,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("examples", "epochs"), [(1, 25), (4, 25), (10, 10), (33, 4), (34, 3), (8333, 3), (8334, 2), (30_000, 1)]
)
def test_epochs_are_openais(examples: int, epochs: int) -> None:
    assert auto_epochs(examples) == epochs


@pytest.mark.parametrize(("examples", "size"), [(1, 1), (600, 1), (1000, 2), (128_000, 256), (1_000_000, 256)])
def test_batches_are_openais(examples: int, size: int) -> None:
    assert auto_batch_size(examples) == size


def test_what_was_asked_for_is_not_changed() -> None:
    made = plan(n_epochs=2, batch_size=3, learning_rate_multiplier=0.5, rank=4, alpha=6, dropout=0.1)
    assert (made.n_epochs, made.batch_size, made.learning_rate, made.seed) == (2, 3, 1e-4, 3)
    assert made.lora is not None
    assert (made.lora.rank, made.lora.alpha, made.lora.dropout) == (4, 6, 0.1)
    assert plan(learning_rate=0.003).learning_rate == 0.003


def test_a_plan_has_the_schedule_that_was_asked_for() -> None:
    assert (plan().schedule, plan().warmup_ratio) == ("cosine", 0.03)
    made = plan(lr_scheduler_type="linear", warmup_ratio=0.5)
    assert (made.schedule, made.warmup_ratio) == ("linear", 0.5)


def test_alpha_is_twice_the_rank_unless_said() -> None:
    made = plan(rank=8)
    assert made.lora is not None
    assert made.lora.alpha == 16


@pytest.mark.parametrize(("most", "rank"), [(1, 1), (8, 8), (16, 16), (64, 16)])
def test_a_rank_that_nobody_named_is_one_that_is_served(most: int, rank: int) -> None:
    default = TrainerConfig("base", max_rank=most).default_rank
    made = plan(default_rank=default)
    assert made.lora is not None
    assert (made.lora.rank, made.lora.alpha) == (rank, 2 * rank)
    assert TrainingConfig("base", max_rank=most).default_rank == rank  # low-level training's is the same


def test_a_batch_has_no_more_examples_than_there_are() -> None:
    assert plan(examples=3, batch_size=64).batch_size == 3


def test_the_longest_example_fits_a_forward() -> None:
    assert plan(longest=10_000).micro_batch_tokens == 10_000
    dpo = replace(REQUEST, method="dpo")
    assert plan(longest=10_000, request=dpo).micro_batch_tokens == 20_000


def test_the_engine_s_length_is_in_the_plan_whatever_the_examples_have() -> None:
    """It decides a LongRoPE's factors, which are to be those that the result is served with."""
    assert [plan(longest=longest).max_model_len for longest in (50, 10_000)] == [100, 100]


def test_dpo_learns_more_slowly_and_has_a_beta() -> None:
    dpo = replace(REQUEST, method="dpo")
    made = plan(request=dpo)
    assert (made.method, made.learning_rate, made.dpo_beta) == ("dpo", 2e-5, 0.1)
    assert plan(request=dpo, beta=0.3).dpo_beta == 0.3


def test_all_weights_learn_more_slowly_and_without_an_adapter() -> None:
    made = plan(training_type="full")
    assert (made.lora, made.learning_rate) == (None, pytest.approx(2e-5))
    assert plan(training_type="full", learning_rate_multiplier=2.0).learning_rate == pytest.approx(4e-5)
    assert plan(training_type="full", learning_rate=1e-3).learning_rate == 1e-3
    dpo = replace(REQUEST, method="dpo")
    assert plan(request=dpo, training_type="full").learning_rate == pytest.approx(2e-6)


FINISHED: list[tuple[Method, dict[str, Any]]] = [
    ("supervised", {}),
    ("supervised", {"learning_rate_multiplier": 1.7, "rank": 4, "lr_scheduler_type": "linear"}),
    ("supervised", {"learning_rate": 3e-4, "dropout": 0.1}),
    ("supervised", {"training_type": "full", "learning_rate_multiplier": 0.3}),
    ("supervised", {"training_type": "full", "learning_rate": 1e-4}),
    ("dpo", {"learning_rate_multiplier": 3.0, "beta": 0.3}),
    ("dpo", {"training_type": "full"}),
]


@pytest.mark.parametrize(("method", "asked"), FINISHED)
def test_what_the_reply_shows_of_a_job_makes_the_same_job_again(method: Method, asked: dict[str, Any]) -> None:
    request = replace(REQUEST, method=method, hyperparameters=Hyperparameters(**asked))
    made = plan(request=replace(REQUEST, method=method), **asked)
    job = Job(
        id="ftjob-1", owner="me", source="base", request=request, seed=3, status=Status.SUCCEEDED, created_at=1.0,
        finished_at=2.0, estimated_finish=None, plan=made.to_json(), total_steps=10, trained_tokens=10,
        fine_tuned_model="ft:base::1", result_file="file-2", failure=None, attempt=1, crashes=0, checkpoint_step=10,
    )  # fmt: skip
    for written in (job, replace(job, plan=None, status=Status.QUEUED)):
        shown = json.loads(FineTuningJob.of(written).model_dump_json())
        places = [{"method": shown["method"]}]
        if method == "supervised":
            places.append({"hyperparameters": shown["hyperparameters"]})
        for place in places:
            again = FineTuningJobRequest.model_validate({"model": "base", "training_file": "file-1", **place}).job()
            assert again.method == method
            assert plan(request=again, **asdict(again.hyperparameters)) == made


def test_steps_are_bounded() -> None:
    assert total_steps(10, 3, 4) == 9
    with pytest.raises(TooManyStepsError, match="10000000 steps; a job has at most 1000000"):
        plan(examples=1_000_000, n_epochs=10, batch_size=1)
