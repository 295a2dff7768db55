"""What the job store holds, as frozen data. Must not know SQL, HTTP or how anything is trained."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

Method = Literal["supervised", "dpo"]
Schedule = Literal["cosine", "linear"]
TrainingType = Literal["lora", "full"]
Level = Literal["info", "warn", "error"]

KEPT_SECONDS = 7 * 86400.0  # after a failure, checkpoints with which a job can go on
MAX_EVENTS = 10_000  # of one job that are kept, unless the server is told otherwise
JOB_ID = "ftjob-"  # how the id of every job begins


class Status(StrEnum):
    VALIDATING = "validating_files"
    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in FINAL


FINAL = frozenset({Status.SUCCEEDED, Status.FAILED, Status.CANCELLED})


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """As asked for; None is "auto"."""

    n_epochs: int | None = None
    batch_size: int | None = None
    learning_rate_multiplier: float | None = None
    learning_rate: float | None = None  # instead of the multiplier
    lr_scheduler_type: Schedule = "cosine"
    warmup_ratio: float = 0.03  # of all steps
    beta: float | None = None  # of DPO
    training_type: TrainingType = "lora"  # what learns: an adapter, or all weights; then the following are nothing
    rank: int | None = None
    alpha: int | None = None  # None: twice the rank
    dropout: float = 0.0


@dataclass(frozen=True, slots=True)
class JobRequest:
    """All that a caller says about a job."""

    model: str
    method: Method
    hyperparameters: Hyperparameters
    training_file: str
    validation_file: str | None = None
    suffix: str | None = None
    seed: int | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    place: str = field(default="hyperparameters", compare=False)  # where the caller gave these, for refusals

    @property
    def is_full(self) -> bool:
        """Whether all weights of the model learn."""
        return self.hyperparameters.training_type == "full"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a job failed, for its owner."""

    code: str
    message: str
    param: str | None = None
    resumable: bool = False  # the job has a checkpoint, which is kept for a while


@dataclass(frozen=True, slots=True)
class Job:
    id: str
    owner: str
    source: str  # what `model` names: a folder, a hub id or the bundled model
    request: JobRequest
    seed: int
    status: Status
    created_at: float  # seconds since 1970, as all times here
    finished_at: float | None
    estimated_finish: float | None
    plan: str | None  # models.training's TrainingPlan as JSON, once the files are validated
    total_steps: int | None
    trained_tokens: int | None
    fine_tuned_model: str | None
    result_file: str | None
    failure: Failure | None
    attempt: int  # how often it was taken up: the fencing token of whoever works on it
    crashes: int  # in a row, without a new checkpoint between them
    checkpoint_step: int  # of the newest one; 0: there is none

    def can_be_resumed(self, now: float) -> bool:
        """Whether it has failed, and its checkpoints are still kept."""
        resumable = self.status is Status.FAILED and self.failure is not None and self.failure.resumable
        return resumable and now < (self.finished_at or 0.0) + KEPT_SECONDS

    @property
    def is_trained(self) -> bool:
        """Whether its last step is in a checkpoint: no weight changes any more."""
        return self.trained_tokens is not None or 0 < (self.total_steps or 0) <= self.checkpoint_step


@dataclass(frozen=True, slots=True)
class Step:
    """One optimiser step's metrics."""

    step: int
    train_loss: float | None  # None: it was not finite, and the step changed nothing
    train_mean_token_accuracy: float | None
    valid_loss: float | None  # None: not measured after this step
    valid_mean_token_accuracy: float | None
    learning_rate: float
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Event:
    sequence: int
    id: str
    created_at: float
    level: Level
    message: str
    type: Literal["message", "metrics"]
    data: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    id: str
    created_at: float
    metrics: Step


@dataclass(frozen=True, slots=True)
class Adapter:
    """A finished job's adapter, to be served under its name."""

    name: str
    owner: str
    job_id: str
    source: str  # the base model it belongs to
    created_at: float
