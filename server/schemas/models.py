"""/v1/models on the wire: OpenAI's card and vLLM's max_model_len."""

from typing import Literal

from pydantic import Field

from server.schemas.wire import WireModel


class ModelCard(WireModel):
    id: str = Field(max_length=4096)
    object: Literal["model"] = "model"
    created: int = Field(ge=0)
    owned_by: Literal["longwave"] = "longwave"
    root: str = Field(max_length=4096)
    max_model_len: int | None = Field(ge=1)


class ModelList(WireModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
