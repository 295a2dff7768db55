"""A plan is checked when it is made, and survives JSON."""

from typing import Any

import pytest

from models.training import LoraSettings, PlanError, TrainingPlan


@pytest.mark.parametrize(
    "plan",
    [
        TrainingPlan("bundled"),
        TrainingPlan("bundled", lora=None, method="dpo", max_length=100, micro_batch_tokens=200),
        TrainingPlan("a/b", lora=LoraSettings(8, 8, 0.1, ("q_proj", "v_proj")), seed=2**63 - 1, learning_rate=3e-5),
    ],
)
def test_a_plan_survives_json(plan: TrainingPlan) -> None:
    assert TrainingPlan.from_json(plan.to_json()) == plan
    assert hash(TrainingPlan.from_json(plan.to_json())) == hash(plan)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_epochs": 0}, "n_epochs must be a whole number at least 1, not 0"),
        ({"batch_size": 2.5}, "batch_size must be a whole number"),
        ({"batch_size": True}, "batch_size must be a whole number"),
        ({"learning_rate": float("nan")}, "learning_rate must be from 0 to 1, not nan"),
        ({"learning_rate": -1e-4}, "learning_rate"),
        ({"warmup_ratio": 1.1}, "warmup_ratio"),
        ({"schedule": "step"}, "schedule must be one of cosine, linear, constant, not 'step'"),
        ({"method": "ppo"}, "method must be one of supervised, dpo"),
        ({"dtype": "float16"}, "dtype must be one of auto, float32, bfloat16"),
        ({"seed": -1}, "seed"),
        ({"dpo_beta": 0.0}, "dpo_beta must be positive"),
        ({"model": ""}, "model must name"),
        ({"max_model_len": 1}, "max_model_len must be a whole number at least 2, not 1"),
        ({"max_length": 5000}, "micro_batch_tokens 4096 must be at least 5000"),
        ({"method": "dpo", "max_length": 2049}, "two answers"),
        ({"lora": LoraSettings(rank=0)}, "lora.rank"),
        ({"lora": LoraSettings(alpha=0)}, "lora.alpha"),
        ({"lora": LoraSettings(dropout=1.0)}, "lora.dropout"),
        ({"lora": LoraSettings(target_modules=())}, "lora.target_modules"),
    ],
)
def test_what_nothing_could_carry_out_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        TrainingPlan(**{"model": "bundled", **changes})


@pytest.mark.parametrize("text", ["", "[]", "null", '{"model": "bundled", "epochs": 3}', '{"lora": {"r": 3}}', "{}"])
def test_json_that_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="not a training plan"):
        TrainingPlan.from_json(text)


def test_differences_name_the_fields() -> None:
    plan, other = TrainingPlan("bundled"), TrainingPlan("bundled", learning_rate=2e-4, seed=7)
    assert plan.differences(other) == ["learning_rate 0.0001 / 0.0002", "seed 0 / 7"]
    assert plan.differences(plan) == []
