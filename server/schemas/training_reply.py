"""Futures of low-level training, and what came of them: Tinker's replies. Knows no request."""

from array import array
from typing import Literal

from server.errors import LongwaveError
from server.schemas.wire import WireModel
from server.training import (
    Computed,
    Created,
    Future,
    Loaded,
    Outcome,
    Sampled,
    SampledSequence,
    Saved,
    Stepped,
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
    """Raises the LongwaveError that the call has ended with, whose reply sends nobody to ask again."""
    outcome = future.outcome
    if outcome is None:
        return TryAgain(request_id=future.request_id)
    if isinstance(outcome, LongwaveError):
        outcome.is_final = True  # whatever it was: it is told the same way for as long as it is kept
        raise outcome.with_traceback(None)  # it is raised often, and would remember each time
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
