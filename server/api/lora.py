"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: vLLM's, for operators who asked for them."""

from typing import Any

from fastapi import APIRouter, Depends
from starlette.responses import PlainTextResponse, Response

from server.api.deps import LifecycleDep
from server.api.json_route import StrictJSONRoute
from server.errors import AdapterExists, EngineUnavailable, InvalidAdapter, ModelNotFound, RouteNotFound, ServerDraining
from server.lifecycle import Phase
from server.schemas.failure import BODY_FAILURES, failures
from server.schemas.models import LoadLoraAdapterRequest, UnloadLoraAdapterRequest
from server.settings import FINE_TUNED, SAVED_WEIGHTS

SUCCESS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {}}}}


async def _only_where_allowed(lifecycle: LifecycleDep) -> None:
    if not lifecycle.settings.allow_runtime_lora_updating:
        raise RouteNotFound(
            "Adapters are not loaded at run time here: the server was started without --allow-runtime-lora-updating."
        )
    if lifecycle.phase is Phase.DRAINING:
        raise ServerDraining("The server is shutting down. Try again later.")
    if lifecycle.generator is None:
        raise EngineUnavailable("The model is still loading. Try again later.")


router = APIRouter(route_class=StrictJSONRoute, tags=["adapters"], dependencies=[Depends(_only_where_allowed)])


@router.post("/v1/load_lora_adapter", response_class=Response, responses=BODY_FAILURES | failures(409, 429) | SUCCESS)
async def load_lora_adapter(body: LoadLoraAdapterRequest, lifecycle: LifecycleDep) -> Response:
    """Serves the LoRA adapter in a folder (as PEFT saves it, inside --lora-dir) under a name."""
    settings = lifecycle.settings
    if body.lora_name in settings.model_names:
        raise AdapterExists(f"`{body.lora_name}` is the base model.", param="lora_name")
    if body.lora_name.startswith(FINE_TUNED):
        raise InvalidAdapter(f"Names that begin with `{FINE_TUNED}` are given by fine-tuning jobs.", param="lora_name")
    if body.lora_name.startswith(SAVED_WEIGHTS):
        raise InvalidAdapter(
            f"Names that begin with `{SAVED_WEIGHTS}` are given by low-level training.", param="lora_name"
        )
    try:
        await lifecycle.engine.load_adapter(
            body.lora_name, body.lora_path, within=str(settings.lora_dir), replace=bool(body.load_inplace)
        )
    except (InvalidAdapter, AdapterExists) as error:
        error.param = error.param or ("lora_name" if isinstance(error, AdapterExists) else "lora_path")
        raise
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", response_class=Response, responses=BODY_FAILURES | SUCCESS)
async def unload_lora_adapter(body: UnloadLoraAdapterRequest, lifecycle: LifecycleDep) -> Response:
    """New requests do not find the name any more; running ones finish. Models of one API key do not exist here."""
    if body.lora_name.startswith(FINE_TUNED):
        raise InvalidAdapter(
            "A fine-tuned model is not unloaded but deleted: DELETE /v1/models/{id}.", param="lora_name"
        )
    if body.lora_name.startswith(SAVED_WEIGHTS):
        raise InvalidAdapter(
            "Saved weights are not unloaded but deleted: POST /v1/training/delete_weights.", param="lora_name"
        )
    try:
        await lifecycle.engine.unload_adapter(body.lora_name, owner="")
    except ModelNotFound as error:
        error.param = "lora_name"
        raise
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
