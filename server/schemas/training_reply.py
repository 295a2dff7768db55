"""What low-level training answers: Tinker's replies. Knows no request."""

from array import array
from typing import Literal

from pydantic import Field

from server.errors import LongwaveError
from server.schemas.wire import WireModel
from server.training import (
    Computed,
    Created,
    Future,
    LiveModel,
    Loaded,
    Outcome,
    Sampled,
    SampledSequence,
    Saved,
    SavedWeights,
    Stepped,
    TrainingConfig,
    Unloaded,
)


class UntypedFuture(WireModel):
    """Every call's answer: where its result will be."""

    request_id: str
    model_id: str
    seq_id: int

    @classmethod
    def of(cls, future: Future, model_id: str) -> "UntypedFuture":
        return cls(request_id=future.request_id, model_id=model_id, seq_id=future.seq_id)


class TryAgain(WireModel):
    """The call has not ended: ask again."""

    type: Literal["try_again"] = "try_again"
    request_id: str
    queue_state: Literal["active"] = "active"


class CreateModelResult(WireModel):
    type: Literal["create_model"] = "create_model"
    model_id: str
    trainable_parameters: int


class LogprobsTensor(WireModel):
    data: list[float]
    dtype: Literal["float32"] = "float32"
    shape: list[int]


class LossFnOutput(WireModel):
    logprobs: LogprobsTensor


class ForwardBackwardResult(WireModel):
    """`metrics`: "loss:sum", "tokens:sum", and PPO's "clipped:sum"."""

    loss_fn_output_type: Literal["TorchLossReturn"] = "TorchLossReturn"
    loss_fn_outputs: list[LossFnOutput]
    metrics: dict[str, float]


class OptimStepResult(WireModel):
    """`metrics`: "grad_norm" (before clipping), "step"."""

    type: Literal["optim_step"] = "optim_step"
    metrics: dict[str, float]


class SaveWeightsResult(WireModel):
    type: Literal["save_weights", "save_weights_for_sampler"]
    path: str


class LoadWeightsResult(WireModel):
    type: Literal["load_weights"] = "load_weights"
    path: str
    step: int


class SampledSequenceResult(WireModel):
    stop_reason: Literal["stop", "length"]
    tokens: list[int]
    logprobs: list[float]

    @classmethod
    def of(cls, sampled: SampledSequence) -> "SampledSequenceResult":
        return cls(stop_reason=sampled.stop_reason, tokens=list(sampled.tokens), logprobs=list(sampled.logprobs))


class SampleResult(WireModel):
    type: Literal["sample"] = "sample"
    sequences: list[SampledSequenceResult]


class UnloadModelResult(WireModel):
    type: Literal["unload_model"] = "unload_model"
    model_id: str


FutureResult = (
    TryAgain
    | CreateModelResult
    | ForwardBackwardResult
    | OptimStepResult
    | SaveWeightsResult
    | LoadWeightsResult
    | SampleResult
    | UnloadModelResult
)


def result_of(future: Future) -> FutureResult:
    """Raises the LongwaveError that the call has ended with."""
    outcome = future.outcome
    if outcome is None:
        return TryAgain(request_id=future.request_id)
    if isinstance(outcome, LongwaveError):
        raise outcome
    return _shown(outcome)


def _shown(outcome: Outcome) -> FutureResult:
    result: FutureResult
    match outcome:
        case Created(model_id=model_id, parameters=parameters):
            result = CreateModelResult(model_id=model_id, trainable_parameters=parameters)
        case Computed():
            result = _computed(outcome)
        case Stepped(grad_norm=norm, steps=steps):
            result = OptimStepResult(metrics={"grad_norm": norm, "step": steps})
        case Saved(path=path, kind="weights"):
            result = SaveWeightsResult(type="save_weights", path=path)
        case Saved(path=path):
            result = SaveWeightsResult(type="save_weights_for_sampler", path=path)
        case Loaded(path=path, steps=steps):
            result = LoadWeightsResult(path=path, step=steps)
        case Sampled(sequences=sequences):
            result = SampleResult(sequences=[SampledSequenceResult.of(sequence) for sequence in sequences])
        case Unloaded(model_id=model_id):
            result = UnloadModelResult(model_id=model_id)
    return result


def _computed(computed: Computed) -> ForwardBackwardResult:
    metrics: dict[str, float] = {"loss:sum": computed.loss, "tokens:sum": computed.tokens}
    if computed.clipped is not None:
        metrics["clipped:sum"] = computed.clipped
    outputs = [list(array("f", values)) for values in computed.logprobs]
    return ForwardBackwardResult(
        loss_fn_outputs=[LossFnOutput(logprobs=LogprobsTensor(data=values, shape=[len(values)])) for values in outputs],
        metrics=metrics,
    )


class ModelData(WireModel):
    model_name: str
    tokenizer_id: str


class ModelInfo(WireModel):
    type: Literal["get_info"] = "get_info"
    model_id: str
    model_name: str
    model_data: ModelData
    is_lora: Literal[True] = True
    lora_rank: int
    lora_alpha: int
    created_at: int
    step: int
    next_seq_id: int
    status: Literal["live", "ended"]
    last_saved: str | None

    @classmethod
    def of(cls, model: LiveModel) -> "ModelInfo":
        return cls(
            model_id=model.id,
            model_name=model.base_model,
            model_data=ModelData(model_name=model.base_model, tokenizer_id=model.base_model),
            lora_rank=model.create.rank,
            lora_alpha=model.create.alpha,
            created_at=model.created_at,
            step=model.steps,
            next_seq_id=model.sequence.next_seq_id,
            status="live" if model.end is None else "ended",
            last_saved=None if model.last_saved is None else model.last_saved.path,
        )


class ModelInfoList(WireModel):
    object: Literal["list"] = "list"
    data: list[ModelInfo]


class SavedWeightsInfo(WireModel):
    path: str
    kind: Literal["weights", "sampler_weights"]
    lora_rank: int
    step: int
    served: bool
    size_bytes: int
    created_at: int

    @classmethod
    def of(cls, saved: SavedWeights) -> "SavedWeightsInfo":
        label = saved.label
        return cls(
            path=label.path,
            kind=label.kind,
            lora_rank=label.rank,
            step=label.steps,
            served=label.served,
            size_bytes=saved.size,
            created_at=label.created_at,
        )


class SavedWeightsList(WireModel):
    object: Literal["list"] = "list"
    data: list[SavedWeightsInfo]


class WeightsDeleted(WireModel):
    path: str
    deleted: Literal[True] = True


class ModelDeletedReply(WireModel):
    model_id: str
    deleted: Literal[True] = True


class SupportedModel(WireModel):
    model_name: str


class Capabilities(WireModel):
    """What this server takes."""

    supported_models: list[SupportedModel]
    loss_fns: list[str]
    max_models: int = Field(ge=1)
    max_lora_rank: int = Field(ge=1)
    max_call_tokens: int = Field(ge=1)
    max_pending_calls: int = Field(ge=1)
    idle_seconds: float
    result_seconds: float
    max_results: int

    @classmethod
    def of(cls, config: TrainingConfig, names: tuple[str, ...]) -> "Capabilities":
        return cls(
            supported_models=[SupportedModel(model_name=name) for name in names],
            loss_fns=["cross_entropy", "importance_sampling", "ppo"],
            max_models=config.max_models,
            max_lora_rank=config.max_rank,
            max_call_tokens=config.max_call_tokens,
            max_pending_calls=config.max_pending,
            idle_seconds=config.idle_seconds,
            result_seconds=config.result_seconds,
            max_results=config.max_results,
        )
