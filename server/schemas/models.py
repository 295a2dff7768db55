"""/v1/models on the wire: OpenAI's card, vLLM's max_model_len and parent, and vLLM's commands for LoRA adapters."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from server.schemas.wire import ModelName, RequestModel, WireModel


class ModelCard(WireModel):
    id: str = Field(max_length=4096)
    object: Literal["model"] = "model"
    created: int = Field(ge=0)
    owned_by: Literal["longwave"] = "longwave"
    root: str = Field(max_length=4096)
    parent: str | None = Field(default=None, max_length=4096)  # of an adapter: the base model
    max_model_len: int | None = Field(ge=1)


class ModelList(WireModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class ModelDeleted(WireModel):
    id: str = Field(max_length=4096)
    object: Literal["model"] = "model"
    deleted: Literal[True] = True


class LoadLoraAdapterRequest(RequestModel):
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"is_3d_lora_weight": (False,)}
    harmless: ClassVar[frozenset[str]] = frozenset({"base_model_name"})

    lora_name: ModelName
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool | None = None


class UnloadLoraAdapterRequest(RequestModel):
    harmless: ClassVar[frozenset[str]] = frozenset({"lora_int_id"})

    lora_name: ModelName
