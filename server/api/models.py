"""GET /v1/models, GET and DELETE /v1/models/{name}."""

from fastapi import APIRouter

from server.api.deps import FineTuningDep, LifecycleDep, OriginDep
from server.engine.adapter_registry import AdapterInfo
from server.errors import InvalidRequest
from server.lifecycle import Lifecycle
from server.schemas.failure import READ_FAILURES, failures
from server.schemas.models import ModelCard, ModelDeleted, ModelList
from server.settings import FINE_TUNED, SAVED_WEIGHTS

router = APIRouter(tags=["models"])


@router.get("/v1/models/", include_in_schema=False)
@router.get("/v1/models", responses=READ_FAILURES)
async def list_models(lifecycle: LifecycleDep, origin: OriginDep) -> ModelList:
    bases = [_base(lifecycle, name) for name in lifecycle.settings.model_names]
    return ModelList(data=bases + [_adapter(lifecycle, info) for info in lifecycle.adapters(origin.owner)])


@router.get("/v1/models/{model:path}", responses=READ_FAILURES | failures(404))
async def retrieve_model(model: str, lifecycle: LifecycleDep, origin: OriginDep) -> ModelCard:
    info = lifecycle.check_model(model, origin.owner)
    return _base(lifecycle, model) if info is None else _adapter(lifecycle, info)


@router.delete("/v1/models/{model:path}", responses=READ_FAILURES | failures(400, 404, 507))
async def delete_model(model: str, lifecycle: LifecycleDep, jobs: FineTuningDep, origin: OriginDep) -> ModelDeleted:
    """Deletes a fine-tuned model for good. Its running answers are finished. Also a whole model that a job has made:
    it is not served here, and not in the list."""
    tuned = await jobs.adapter(model) if model.startswith(FINE_TUNED) else None
    if tuned is None and model.startswith(FINE_TUNED) and await jobs.remove_model(model, origin.owner):
        return ModelDeleted(id=model)
    if tuned is None or tuned.owner != origin.owner:
        lifecycle.check_model(model, origin.owner)
        raise InvalidRequest(f"`{model}` is not a model fine-tuned here: only those are deleted.", param="model")
    await jobs.remove_adapter(tuned)
    return ModelDeleted(id=model)


def _base(lifecycle: Lifecycle, name: str) -> ModelCard:
    return ModelCard(
        id=name, created=lifecycle.created, root=lifecycle.settings.model, max_model_len=lifecycle.max_model_len
    )


def _adapter(lifecycle: Lifecycle, info: AdapterInfo) -> ModelCard:
    """Where a model trained here lies is no caller's business; of others, somebody who may know has said it."""
    settings = lifecycle.settings
    return ModelCard(
        id=info.name,
        created=info.created,
        root=settings.model if info.name.startswith((FINE_TUNED, SAVED_WEIGHTS)) else info.folder,
        parent=settings.model_names[0],
        max_model_len=lifecycle.max_model_len,
    )
