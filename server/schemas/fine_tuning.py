"""What a caller may say of a fine-tuning job: OpenAI's request, with `learning_rate`, its schedule, `training_type` and
`lora` beside its hyperparameters. What a reply shows of a job's method makes the same job again."""

import math
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, model_validator

from server.errors import InvalidRequest, UnsupportedParameter
from server.finetune.hyperparameters import usual_rate
from server.finetune.records import Hyperparameters, JobRequest, Method, Schedule, TrainingType
from server.schemas.labels import Metadata
from server.schemas.wire import ModelName, RequestModel

MAX_PAGE = 100
MAX_SEED = 2**31 - 1
MAX_EPOCHS, MAX_BATCH = 50, 256
MAX_RANK = 512
SAME_RATE = 1e-6  # two learning rates that differ by no more, relatively, are one

Auto = Literal["auto"]
Number = TypeVar("Number", int, float)
FileId = Annotated[str, Field(min_length=1, max_length=64)]


class LoraRequest(RequestModel):
    """PEFT's names. The update of a weight is alpha / rank times a product of rank `rank`."""

    rank: Annotated[
        Annotated[int, Field(ge=1, le=MAX_RANK)] | None,
        Field(description="Default: 16, or --max-lora-rank where that is lower."),
    ] = None
    alpha: Annotated[int, Field(ge=1, le=4096)] | None = None
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0


class HyperparametersRequest(RequestModel):
    """Null, where it is taken, is as good as nothing."""

    method: ClassVar[Method] = "supervised"

    n_epochs: Annotated[int, Field(ge=1, le=MAX_EPOCHS)] | Auto | None = "auto"
    batch_size: Annotated[int, Field(ge=1, le=MAX_BATCH)] | Auto | None = "auto"
    learning_rate_multiplier: Annotated[float, Field(gt=0, le=100)] | Auto | None = "auto"
    learning_rate: Annotated[float, Field(gt=0, le=0.1)] | None = None
    lr_scheduler_type: Annotated[
        Schedule, Field(description="How the learning rate goes to 0 after the warm-up; transformers' name for it.")
    ] = "cosine"
    warmup_ratio: Annotated[
        float, Field(ge=0, le=1, description="The share of all steps in which the learning rate rises to its peak.")
    ] = 0.03
    training_type: Annotated[
        TrainingType, Field(description="lora: an adapter, served at once. full: all weights, kept as a model folder.")
    ] = "lora"
    lora: LoraRequest | None = None

    @model_validator(mode="after")
    def _one_learning_rate(self) -> "HyperparametersRequest":
        multiplier = _chosen(self.learning_rate_multiplier)
        if self.learning_rate is None or multiplier is None:
            return self
        rate = multiplier * usual_rate(self.method, is_full=self.training_type == "full")
        if not math.isclose(self.learning_rate, rate, rel_tol=SAME_RATE):
            raise ValueError(
                "give learning_rate or learning_rate_multiplier, not both: this multiplier makes a learning_rate of "
                f"{rate:.6g}"
            )
        return self

    @model_validator(mode="after")
    def _no_adapter_beside_all_weights(self) -> "HyperparametersRequest":
        if self.training_type == "full" and self.lora is not None:
            raise ValueError("with training_type full there is no adapter: leave `lora` out")
        return self

    def known(self) -> Hyperparameters:
        lora, multiplier = self.lora or LoraRequest(), _chosen(self.learning_rate_multiplier)
        return Hyperparameters(
            n_epochs=_chosen(self.n_epochs),
            batch_size=_chosen(self.batch_size),
            learning_rate_multiplier=multiplier,
            learning_rate=self.learning_rate if multiplier is None else None,  # where both are there they agree
            lr_scheduler_type=self.lr_scheduler_type,
            warmup_ratio=self.warmup_ratio,
            beta=self.known_beta,
            training_type=self.training_type,
            rank=lora.rank,
            alpha=lora.alpha,
            dropout=lora.dropout,
        )

    @property
    def known_beta(self) -> float | None:
        return None


class DpoHyperparametersRequest(HyperparametersRequest):
    method: ClassVar[Method] = "dpo"

    beta: Annotated[float, Field(gt=0, le=10)] | Auto | None = "auto"

    @property
    def known_beta(self) -> float | None:
        return _chosen(self.beta)


class SupervisedMethodRequest(RequestModel):
    hyperparameters: HyperparametersRequest | None = None


class DpoMethodRequest(RequestModel):
    hyperparameters: DpoHyperparametersRequest | None = None


class MethodRequest(RequestModel):
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"reinforcement": ()}

    type: Literal["supervised", "dpo"]
    supervised: SupervisedMethodRequest | None = None
    dpo: DpoMethodRequest | None = None

    @model_validator(mode="before")
    @classmethod
    def _served(cls, method: Any) -> Any:
        if isinstance(method, dict) and method.get("type") == "reinforcement":
            raise UnsupportedParameter(
                "The method 'reinforcement' is not served; methods are supervised and dpo.", param="method.type"
            )
        return method

    @model_validator(mode="after")
    def _of_its_type(self) -> "MethodRequest":
        other = "dpo" if self.type == "supervised" else "supervised"
        if getattr(self, other) is not None:
            raise ValueError(f"the type is {self.type}, so '{other}' must not be there")
        return self

    @property
    def hyperparameters(self) -> HyperparametersRequest:
        if self.type == "dpo":
            return (self.dpo or DpoMethodRequest()).hyperparameters or DpoHyperparametersRequest()
        return (self.supervised or SupervisedMethodRequest()).hyperparameters or HyperparametersRequest()


class FineTuningJobRequest(RequestModel):
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"integrations": ([],)}

    model: ModelName
    training_file: FileId
    validation_file: FileId | None = None
    method: MethodRequest | None = None
    hyperparameters: HyperparametersRequest | None = None  # of supervised jobs; `method` has taken its place
    suffix: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    metadata: Metadata | None = None

    @model_validator(mode="after")
    def _hyperparameters_once(self) -> "FineTuningJobRequest":
        if self.method is not None and self.hyperparameters is not None:
            message = "Give hyperparameters inside `method`, or at the top level, not both."
            raise InvalidRequest(message, param="hyperparameters")
        return self

    def job(self) -> JobRequest:
        method = self.method or MethodRequest(type="supervised")
        place = "hyperparameters" if self.method is None else f"method.{method.type}.hyperparameters"
        return JobRequest(
            model=self.model,
            method=method.type,
            hyperparameters=(self.hyperparameters or method.hyperparameters).known(),
            training_file=self.training_file,
            validation_file=self.validation_file,
            suffix=self.suffix,
            seed=self.seed,
            metadata=self.metadata or {},
            place=place,
        )


def _chosen(given: Number | Auto | None) -> Number | None:
    return None if given == "auto" else given
