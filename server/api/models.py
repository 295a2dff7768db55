"""GET /v1/models and /v1/models/{name}."""

from fastapi import APIRouter

from server.api.deps import LifecycleDep
from server.lifecycle import Lifecycle
from server.schemas.failure import READ_FAILURES, failures
from server.schemas.models import ModelCard, ModelList

router = APIRouter(tags=["models"])


@router.get("/v1/models", responses=READ_FAILURES)
async def list_models(lifecycle: LifecycleDep) -> ModelList:
    return ModelList(data=[_card(lifecycle, name) for name in lifecycle.settings.model_names])


@router.get("/v1/models/{model:path}", responses=READ_FAILURES | failures(404))
async def retrieve_model(model: str, lifecycle: LifecycleDep) -> ModelCard:
    lifecycle.check_model(model)
    return _card(lifecycle, model)


def _card(lifecycle: Lifecycle, name: str) -> ModelCard:
    return ModelCard(
        id=name, created=lifecycle.created, root=lifecycle.settings.model, max_model_len=lifecycle.max_model_len
    )
