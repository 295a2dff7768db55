"""What low-level training tells of models, weights and itself. Knows no call."""

from typing import Literal

from pydantic import Field

from models.training import REQUIRED_INPUTS
from server.schemas.wire import WireModel
from server.training import LiveModel, SavedWeights, TrainingConfig


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
            next_seq_id=model.sequence.free_seq_id,
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
            loss_fns=list(REQUIRED_INPUTS),
            max_models=config.max_models,
            max_lora_rank=config.max_rank,
            max_call_tokens=config.max_call_tokens,
            max_pending_calls=config.max_pending,
            idle_seconds=config.idle_seconds,
            result_seconds=config.result_seconds,
            max_results=config.max_results,
        )
