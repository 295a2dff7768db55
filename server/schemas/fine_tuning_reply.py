"""Fine-tuning jobs, their events and checkpoints as OpenAI writes them."""

from typing import Any, Literal

from pydantic import Field, model_serializer

from server.finetune import Checkpoint, Event, Job, Status, checkpoint_name, decided, metrics
from server.finetune.records import Schedule, TrainingType
from server.schemas.wire import WireModel


class LoraFields(WireModel):
    """Null is not decided yet: it is when the files are validated."""

    rank: int | None
    alpha: int | None
    dropout: float


class HyperparameterFields(WireModel):
    """`beta` is there for DPO only; `lora` is null where all weights learn."""

    n_epochs: int | Literal["auto"]
    batch_size: int | Literal["auto"]
    learning_rate_multiplier: float | Literal["auto"] | None
    learning_rate: float | None
    lr_scheduler_type: Schedule
    warmup_ratio: float
    beta: float | Literal["auto"] | None
    training_type: TrainingType
    lora: LoraFields | None

    @classmethod
    def of(cls, job: Job) -> "HyperparameterFields":
        known = decided(job)
        explicit = job.request.hyperparameters.learning_rate is not None
        return cls(
            n_epochs=known.n_epochs or "auto",
            batch_size=known.batch_size or "auto",
            learning_rate_multiplier=None if explicit else known.learning_rate_multiplier or "auto",
            learning_rate=known.learning_rate,
            lr_scheduler_type=known.lr_scheduler_type,
            warmup_ratio=known.warmup_ratio,
            beta=(known.beta or "auto") if job.request.method == "dpo" else None,
            training_type=known.training_type,
            lora=None if job.request.is_full else LoraFields(rank=known.rank, alpha=known.alpha, dropout=known.dropout),
        )

    @model_serializer
    def _known(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "n_epochs": self.n_epochs,
            "batch_size": self.batch_size,
            "learning_rate_multiplier": self.learning_rate_multiplier,
            "learning_rate": self.learning_rate,
            "lr_scheduler_type": self.lr_scheduler_type,
            "warmup_ratio": self.warmup_ratio,
            "training_type": self.training_type,
            "lora": None if self.lora is None else self.lora.model_dump(),
        }
        return fields if self.beta is None else {**fields, "beta": self.beta}


class MethodObject(WireModel):
    type: Literal["supervised", "dpo"]
    hyperparameters: HyperparameterFields

    @model_serializer
    def _under_its_type(self) -> dict[str, Any]:
        return {"type": self.type, self.type: {"hyperparameters": self.hyperparameters.model_dump()}}


class JobError(WireModel):
    code: str = Field(max_length=64)
    message: str = Field(max_length=65_536)
    param: str | None = Field(max_length=64)


class FineTuningJob(WireModel):
    id: str = Field(max_length=64)
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    finished_at: int | None
    estimated_finish: int | None
    model: str = Field(max_length=256)
    fine_tuned_model: str | None = Field(max_length=256)
    organization_id: Literal["longwave"] = "longwave"
    status: Status
    training_file: str = Field(max_length=64)
    validation_file: str | None = Field(max_length=64)
    result_files: list[str]
    trained_tokens: int | None
    total_steps: int | None
    seed: int
    method: MethodObject
    hyperparameters: HyperparameterFields
    metadata: dict[str, str]
    integrations: tuple[()] = ()
    error: JobError | None

    @classmethod
    def of(cls, job: Job) -> "FineTuningJob":
        asked, failure = job.request, job.failure
        hyperparameters = HyperparameterFields.of(job)
        return cls(
            id=job.id,
            created_at=int(job.created_at),
            finished_at=_seconds(job.finished_at),
            estimated_finish=_seconds(job.estimated_finish),
            model=asked.model,
            fine_tuned_model=job.fine_tuned_model,
            status=job.status,
            training_file=asked.training_file,
            validation_file=asked.validation_file,
            result_files=[] if job.result_file is None else [job.result_file],
            trained_tokens=job.trained_tokens if job.status == "succeeded" else None,
            total_steps=job.total_steps,
            seed=job.seed,
            method=MethodObject(type=asked.method, hyperparameters=hyperparameters),
            hyperparameters=hyperparameters,
            metadata=asked.metadata,
            error=None if failure is None else JobError(
                code=failure.code, message=failure.message, param=failure.param
            ),
        )  # fmt: skip


class FineTuningJobList(WireModel):
    object: Literal["list"] = "list"
    data: list[FineTuningJob]
    has_more: bool


class FineTuningJobEvent(WireModel):
    id: str = Field(max_length=64)
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: Literal["info", "warn", "error"]
    message: str
    type: Literal["message", "metrics"]
    data: dict[str, int | float] | None

    @classmethod
    def of(cls, event: Event) -> "FineTuningJobEvent":
        return cls(
            id=event.id,
            created_at=int(event.created_at),
            level=event.level,
            message=event.message,
            type=event.type,
            data=event.data,
        )


class FineTuningJobEventList(WireModel):
    object: Literal["list"] = "list"
    data: list[FineTuningJobEvent]
    has_more: bool


class CheckpointMetrics(WireModel):
    """What was not measured is absent."""

    step: int
    train_loss: float | None = None
    train_mean_token_accuracy: float | None = None
    valid_loss: float | None = None
    valid_mean_token_accuracy: float | None = None
    full_valid_loss: float | None = None
    full_valid_mean_token_accuracy: float | None = None

    @model_serializer
    def _measured(self) -> dict[str, int | float]:
        return {name: value for name, value in dict(self).items() if value is not None}


class FineTuningJobCheckpoint(WireModel):
    id: str = Field(max_length=64)
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuning_job_id: str = Field(max_length=64)
    fine_tuned_model_checkpoint: str = Field(max_length=512)
    step_number: int
    metrics: CheckpointMetrics

    @classmethod
    def of(cls, job: Job, checkpoint: Checkpoint) -> "FineTuningJobCheckpoint":
        step = checkpoint.metrics.step
        return cls(
            id=checkpoint.id,
            created_at=int(checkpoint.created_at),
            fine_tuning_job_id=job.id,
            fine_tuned_model_checkpoint=checkpoint_name(job, step),
            step_number=step,
            metrics=CheckpointMetrics.model_validate(metrics(checkpoint.metrics)),
        )


class FineTuningJobCheckpointList(WireModel):
    object: Literal["list"] = "list"
    data: list[FineTuningJobCheckpoint]
    first_id: str | None
    last_id: str | None
    has_more: bool


def _seconds(time: float | None) -> int | None:
    return None if time is None else int(time)
