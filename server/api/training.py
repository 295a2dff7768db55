"""/v1/training: Tinker's calls on live models. Every change is a future, in the order of its model's seq_id."""

import asyncio
import contextlib
from typing import Annotated

from fastapi import APIRouter, Header, Path
from starlette.responses import Response

from server.api.deps import LifecycleDep, OriginDep, TrainingDep
from server.api.json_route import TrainingRoute
from server.api.piecewise import written
from server.errors import EngineUnavailable, InvalidRequest, ModelNotFound, ServerDraining
from server.lifecycle import Lifecycle, Phase
from server.schemas.failure import BODY_FAILURES, READ_FAILURES, failures
from server.schemas.training import (
    ComputeRequest,
    CreateModelRequest,
    DeleteWeightsRequest,
    LoadWeightsRequest,
    ModelRequest,
    OptimStepRequest,
    OrderedRequest,
    RetrieveFutureRequest,
    SampleRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from server.schemas.training_info import (
    Capabilities,
    ModelDeletedReply,
    ModelInfo,
    ModelInfoList,
    SavedWeightsInfo,
    SavedWeightsList,
    WeightsDeleted,
)
from server.schemas.training_reply import FutureResult, UntypedFuture, result_of
from server.training import Call, Training, Unload

PATH = "/v1/training"
CALL_FAILURES = BODY_FAILURES | failures(409, 429)
WAIT_SECONDS = 20.0  # that retrieve_future holds a request whose call has not ended

router = APIRouter(prefix=PATH, route_class=TrainingRoute, tags=["low-level training"])


@router.get("/get_server_capabilities", responses=READ_FAILURES)
async def get_server_capabilities(lifecycle: LifecycleDep, training: TrainingDep) -> Capabilities:
    """What this server trains, and its limits."""
    return Capabilities.of(training.config, lifecycle.settings.model_names)


@router.post("/create_model", responses=CALL_FAILURES)
async def create_model(
    body: CreateModelRequest,
    lifecycle: LifecycleDep,
    training: TrainingDep,
    origin: OriginDep,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=256)] = None,
) -> UntypedFuture:
    """A new LoRA model on the base model. Sent again with the same `Idempotency-Key`, it is the same model."""
    _accepting(lifecycle)
    if _is_adapter(body.base_model, lifecycle):
        raise InvalidRequest(
            "Models are made of the base model; load_weights takes them further: "
            + ", ".join(lifecycle.settings.model_names),
            param="base_model",
        )
    model = await training.create(
        origin.owner, body.base_model, body.call(), salt=origin.cache_salt, key=idempotency_key
    )
    return UntypedFuture.of(model.creating, model.id)


@router.post("/forward_backward", responses=CALL_FAILURES)
async def forward_backward(
    body: ComputeRequest, lifecycle: LifecycleDep, training: TrainingDep, origin: OriginDep
) -> UntypedFuture:
    """Losses and log-probabilities; the gradient is added to what the model has since its last step."""
    call = await asyncio.to_thread(body.call, backward=True)  # packs thousands of data
    return _submit(body, call, lifecycle, training, origin.owner)


@router.post("/forward", responses=CALL_FAILURES)
async def forward(
    body: ComputeRequest, lifecycle: LifecycleDep, training: TrainingDep, origin: OriginDep
) -> UntypedFuture:
    """Losses and log-probabilities, no gradient."""
    call = await asyncio.to_thread(body.call, backward=False)
    return _submit(body, call, lifecycle, training, origin.owner)


@router.post("/optim_step", responses=CALL_FAILURES)
async def optim_step(
    body: OptimStepRequest, lifecycle: LifecycleDep, training: TrainingDep, origin: OriginDep
) -> UntypedFuture:
    """One step of AdamW on the gradient of all forward_backward since the last one."""
    return _submit(body, body.call(), lifecycle, training, origin.owner)


@router.post("/save_weights", responses=CALL_FAILURES)
async def save_weights(
    body: SaveWeightsRequest, lifecycle: LifecycleDep, training: TrainingDep, origin: OriginDep
) -> UntypedFuture:
    """Weights and optimiser under a name, to load again; with `serve`, as a model under their path, too."""
    return _submit(body, body.call(), lifecycle, training, origin.owner)


@router.post("/save_weights_for_sampler", responses=CALL_FAILURES)
async def save_weights_for_sampler(
    body: SaveWeightsForSamplerRequest, lifecycle: LifecycleDep, training: TrainingDep, origin: OriginDep
) -> UntypedFuture:
    """Weights under a name, served as a model under their path."""
    return _submit(body, body.call(), lifecycle, training, origin.owner)


@router.post("/load_weights", responses=CALL_FAILURES)
async def load_weights(
    body: LoadWeightsRequest, lifecycle: LifecycleDep, training: TrainingDep, origin: OriginDep
) -> UntypedFuture:
    """Weights that were saved; with `optimizer`, its state too. The gradient is discarded."""
    return _submit(body, body.call(), lifecycle, training, origin.owner)


@router.post("/sample", responses=CALL_FAILURES)
async def sample(
    body: SampleRequest, lifecycle: LifecycleDep, training: TrainingDep, origin: OriginDep
) -> UntypedFuture:
    """Token ids and log-probabilities from the weights as they are at this place of the sequence."""
    if body.num_samples > lifecycle.settings.max_n:
        raise InvalidRequest(
            f"num_samples is {body.num_samples}; at most {lifecycle.settings.max_n} are served at once (max_n).",
            param="num_samples",
        )
    return _submit(body, body.call(), lifecycle, training, origin.owner)


@router.post("/unload_model", responses=CALL_FAILURES)
async def unload_model(
    body: OrderedRequest, lifecycle: LifecycleDep, training: TrainingDep, origin: OriginDep
) -> UntypedFuture:
    """Ends the model, when its calls before this one have ended. What was saved stays."""
    return _submit(body, Unload(), lifecycle, training, origin.owner)


@router.post("/retrieve_future", response_model=FutureResult, responses=CALL_FAILURES | failures(507))
async def retrieve_future(body: RetrieveFutureRequest, training: TrainingDep, origin: OriginDep) -> Response:
    """The call's result, or its error; while it has not ended, after a while: try_again."""
    future = training.future(body.request_id, origin.owner)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(WAIT_SECONDS):
            await future.ended.wait()
    # In a thread: samples may have a million tokens.
    return written(await asyncio.to_thread(lambda: result_of(future).model_dump_json().encode()))


@router.post("/get_info", responses=CALL_FAILURES)
async def get_info(body: ModelRequest, training: TrainingDep, origin: OriginDep) -> ModelInfo:
    """What is known of a model; also for a while after its end."""
    return ModelInfo.of(training.model(body.model_id, origin.owner))


@router.get("/models", responses=READ_FAILURES)
async def list_models(training: TrainingDep, origin: OriginDep) -> ModelInfoList:
    """The caller's live models."""
    return ModelInfoList(data=[ModelInfo.of(model) for model in training.live(origin.owner)])


@router.delete("/models/{model_id}", responses=READ_FAILURES | failures(400, 404))
async def delete_model(
    model_id: Annotated[str, Path(max_length=64)], training: TrainingDep, origin: OriginDep
) -> ModelDeletedReply:
    """Ends the model at once: its open calls fail. What was saved stays."""
    await training.delete(training.model(model_id, origin.owner))
    return ModelDeletedReply(model_id=model_id)


@router.get("/weights", responses=READ_FAILURES)
async def list_weights(training: TrainingDep, origin: OriginDep) -> SavedWeightsList:
    """The caller's saved weights, the oldest first."""
    return SavedWeightsList(data=[SavedWeightsInfo.of(saved) for saved in await training.saved(origin.owner)])


@router.post("/delete_weights", responses=CALL_FAILURES | failures(507))
async def delete_weights(body: DeleteWeightsRequest, training: TrainingDep, origin: OriginDep) -> WeightsDeleted:
    """Deletes saved weights for good. Running answers of them are finished."""
    await training.delete_weights(body.path, origin.owner)
    return WeightsDeleted(path=body.path)


def _submit(body: OrderedRequest, call: Call, lifecycle: Lifecycle, training: Training, owner: str) -> UntypedFuture:
    _accepting(lifecycle)
    model = training.model(body.model_id, owner)
    return UntypedFuture.of(training.submit(model, body.seq_id, call), model.id)


def _is_adapter(base_model: str, lifecycle: Lifecycle) -> bool:
    try:
        return lifecycle.check_model(base_model) is not None
    except ModelNotFound as error:
        error.param = "base_model"
        raise


def _accepting(lifecycle: Lifecycle) -> None:
    if lifecycle.phase is Phase.DRAINING:
        raise ServerDraining("The server is shutting down. Try again later.")
    if lifecycle.generator is None:
        raise EngineUnavailable("The model is still loading. Try again later.")
