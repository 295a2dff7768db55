"""What a caller left to "auto", decided from the validated files: a request -> a whole training plan. Pure arithmetic;
must not know HTTP, SQL or tensors."""

import math
from dataclasses import replace

from models.training import LoraSettings, TrainingPlan
from server.finetune.messages import Validated
from server.finetune.records import Hyperparameters, Job, JobRequest, Method

MAX_STEPS = 1_000_000
# OpenAI's rules: about 100 examples are seen in all, epochs from 1 to 25, about 3 of them
# (https://cookbook.openai.com/examples/chat_finetuning_data_prep), and batches of 0.2 % of the examples, 256 at most.
TARGET_EPOCHS, MIN_SEEN, MAX_SEEN, MAX_AUTO_EPOCHS = 3, 100, 25_000, 25
BATCH_SHARE, MAX_AUTO_BATCH = 0.002, 256
#: Of LoRA: about ten times what full fine-tuning takes (Schulman et al. 2025, "LoRA Without Regret"); of DPO: a tenth.
LEARNING_RATES = {"supervised": 2e-4, "dpo": 2e-5}
FULL_SHARE = 0.1
DPO_BETA = 0.1


class TooManyStepsError(Exception):
    """More steps than a job may have."""


def auto_epochs(examples: int) -> int:
    if examples * TARGET_EPOCHS < MIN_SEEN:
        return min(MAX_AUTO_EPOCHS, math.ceil(MIN_SEEN / examples))
    if examples * TARGET_EPOCHS > MAX_SEEN:
        return max(1, MAX_SEEN // examples)
    return TARGET_EPOCHS


def auto_batch_size(examples: int) -> int:
    return min(MAX_AUTO_BATCH, max(1, round(examples * BATCH_SHARE)))


def total_steps(examples: int, n_epochs: int, batch_size: int) -> int:
    return n_epochs * math.ceil(examples / batch_size)


def usual_rate(method: Method, *, is_full: bool) -> float:
    """The learning rate that the multiplier 1 stands for."""
    return LEARNING_RATES[method] * (FULL_SHARE if is_full else 1.0)


def make_plan(
    request: JobRequest,
    source: str,
    seed: int,
    files: Validated,
    *,
    checkpoint_every: int,
    micro_batch_tokens: int,
    default_rank: int,
    max_model_len: int | None,
    deterministic: bool = False,
) -> TrainingPlan:
    """`micro_batch_tokens`: at least; the longest example has to fit. Raises TooManyStepsError, PlanError."""
    asked = request.hyperparameters
    n_epochs = asked.n_epochs or auto_epochs(files.examples)
    batch_size = min(asked.batch_size or auto_batch_size(files.examples), files.examples)
    steps = total_steps(files.examples, n_epochs, batch_size)
    if steps > MAX_STEPS:
        raise TooManyStepsError(
            f"{files.examples} examples in batches of {batch_size}, {n_epochs} times, are {steps} steps; a job has at "
            f"most {MAX_STEPS}."
        )
    usual = usual_rate(request.method, is_full=request.is_full)
    rate = asked.learning_rate or usual * (asked.learning_rate_multiplier or 1.0)
    rank = asked.rank or default_rank
    sequences = 2 if request.method == "dpo" else 1
    return TrainingPlan(
        model=source,
        method=request.method,
        n_epochs=n_epochs,
        batch_size=batch_size,
        learning_rate=rate,
        schedule=asked.lr_scheduler_type,
        warmup_ratio=asked.warmup_ratio,
        lora=None if request.is_full else LoraSettings(rank, asked.alpha or 2 * rank, asked.dropout),
        max_length=max(files.longest, 2),
        max_model_len=max_model_len,
        micro_batch_tokens=max(micro_batch_tokens, sequences * max(files.longest, 2)),
        seed=seed,
        checkpoint_every=checkpoint_every,
        dpo_beta=asked.beta or DPO_BETA,
        deterministic=deterministic,
    )


def decided(job: Job) -> Hyperparameters:
    """A job's hyperparameters as far as they are known: before its files are validated, None is "auto"."""
    asked = job.request.hyperparameters
    if job.plan is None:
        return asked
    plan = TrainingPlan.from_json(job.plan)
    multiplier = asked.learning_rate_multiplier or (1.0 if asked.learning_rate is None else None)
    return replace(
        asked,
        n_epochs=plan.n_epochs,
        batch_size=plan.batch_size,
        learning_rate=plan.learning_rate,
        learning_rate_multiplier=multiplier,
        beta=plan.dpo_beta if plan.method == "dpo" else None,
        rank=None if plan.lora is None else plan.lora.rank,
        alpha=None if plan.lora is None else plan.lora.alpha,
    )
