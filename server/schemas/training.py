"""What a caller may say to low-level training: Tinker's requests. Their data are in schemas.training_data."""

from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from models.training import LossName
from server.errors import InvalidRequest
from server.schemas.sampling import MAX_STOP_CHARACTERS, MAX_STOP_TOKEN_IDS, MAX_STOPS, TokenCount
from server.schemas.sampling_defaults import MAX_TOP_K
from server.schemas.training_data import MAX_NUMBER, Datum, ModelInput, token_ids
from server.schemas.wire import ModelName, RequestModel, TokenId
from server.training import Compute, LoadWeights, NewModel, OptimStep, Sample, SaveWeights

MAX_DATA = 4096  # of one call
MAX_SEQ_ID = 2**53 - 1
MAX_SAMPLES = 128
MAX_SEED = 2**31 - 1

ModelId = Annotated[str, Field(min_length=1, max_length=64)]
SeqId = Annotated[int, Field(ge=1, le=MAX_SEQ_ID)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", max_length=64)]
WeightsPath = Annotated[str, Field(min_length=1, max_length=256)]
Linear = Annotated[str, Field(min_length=1, max_length=64)]


class LoraConfigRequest(RequestModel):
    """Tinker's `rank` and `seed`, PEFT's `alpha` and `target_modules` (default: every linear of the decoder layers)."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "train_unembed": (False,),
        "train_mlp": (True,),
        "train_attn": (True,),
    }

    rank: Annotated[
        Annotated[int, Field(ge=1, le=512)] | None,
        Field(description="Default: 16, or --max-lora-rank where that is lower."),
    ] = None
    alpha: Annotated[int, Field(ge=1, le=4096)] = 32
    target_modules: Annotated[list[Linear], Field(min_length=1, max_length=64)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None


class CreateModelRequest(RequestModel):
    harmless: ClassVar[frozenset[str]] = frozenset({"type", "user_metadata"})

    base_model: ModelName
    lora_config: LoraConfigRequest | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None

    @model_validator(mode="after")
    def _one_seed(self) -> "CreateModelRequest":
        if self.seed is not None and self.lora_config is not None and self.lora_config.seed is not None:
            raise InvalidRequest("Give seed, or lora_config.seed, not both.", param="seed")
        return self

    def call(self) -> NewModel:
        lora = self.lora_config or LoraConfigRequest()
        return NewModel(
            rank=lora.rank,
            alpha=lora.alpha,
            target_modules=None if lora.target_modules is None else tuple(sorted(set(lora.target_modules))),
            seed=self.seed or lora.seed or 0,
        )


class ModelRequest(RequestModel):
    harmless: ClassVar[frozenset[str]] = frozenset({"type"})

    model_id: ModelId


class OrderedRequest(ModelRequest):
    seq_id: SeqId | None = None


class PpoConfig(RequestModel):
    """Bounds of the probability ratio."""

    clip_low_threshold: Annotated[float, Field(ge=0, le=1)] = 0.8
    clip_high_threshold: Annotated[float, Field(ge=1, le=100)] = 1.2


class ComputeRequest(OrderedRequest):
    data: Annotated[list[Datum], Field(fail_fast=True, min_length=1, max_length=MAX_DATA)]
    loss_fn: LossName = "cross_entropy"
    loss_fn_config: PpoConfig | None = None

    @model_validator(mode="after")
    def _config_of_ppo(self) -> "ComputeRequest":
        if self.loss_fn_config is not None and self.loss_fn != "ppo":
            raise InvalidRequest(f"{self.loss_fn} has no loss_fn_config; ppo has.", param="loss_fn_config")
        return self

    def call(self, *, backward: bool) -> Compute:
        clip = self.loss_fn_config or PpoConfig()
        return Compute(
            data=tuple(datum.packed() for datum in self.data),
            loss_fn=self.loss_fn,
            backward=backward,
            clip_low=clip.clip_low_threshold,
            clip_high=clip.clip_high_threshold,
        )


class AdamParamsRequest(RequestModel):
    """Tinker's defaults."""

    learning_rate: Annotated[float, Field(ge=0, le=10)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0, le=MAX_NUMBER, description="0: no clipping.")] = 0.0


class OptimStepRequest(OrderedRequest):
    adam_params: AdamParamsRequest | None = None

    def call(self) -> OptimStep:
        return OptimStep(**(self.adam_params or AdamParamsRequest()).model_dump())


class SaveWeightsRequest(OrderedRequest):
    path: Name
    overwrite: bool = False
    serve: bool = False

    def call(self) -> SaveWeights:
        return SaveWeights(self.path, "weights", self.serve, self.overwrite)


class SaveWeightsForSamplerRequest(OrderedRequest):
    path: Name
    overwrite: bool = False

    def call(self) -> SaveWeights:
        return SaveWeights(self.path, "sampler_weights", True, self.overwrite)


class LoadWeightsRequest(OrderedRequest):
    path: WeightsPath
    optimizer: bool = False

    def call(self) -> LoadWeights:
        return LoadWeights(self.path, self.optimizer)


class DeleteWeightsRequest(RequestModel):
    path: WeightsPath


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
StopTokens = Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_STOP_TOKEN_IDS)]


class SamplingParamsRequest(RequestModel):
    max_tokens: TokenCount | None = None
    seed: Annotated[int, Field(ge=0, le=2**62)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | StopTokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOP_K, description="0 or -1: off.")] = -1
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in given if isinstance(stop, str))

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        given = self.stop if isinstance(self.stop, list) else []
        return tuple(stop for stop in given if isinstance(stop, int))


class SampleRequest(OrderedRequest):
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "prompt_logprobs": (False,),
        "topk_prompt_logprobs": (0,),
    }

    prompt: ModelInput
    num_samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    sampling_params: SamplingParamsRequest | None = None

    def call(self) -> Sample:
        params = self.sampling_params or SamplingParamsRequest()
        return Sample(
            prompt=token_ids(self.prompt),
            num_samples=self.num_samples,
            max_tokens=params.max_tokens,
            temperature=float(params.temperature),
            top_k=params.top_k,
            top_p=float(params.top_p),
            seed=params.seed,
            stop=params.stop_strings,
            stop_token_ids=params.stop_token_ids,
        )


class RetrieveFutureRequest(RequestModel):
    request_id: Annotated[str, Field(min_length=1, max_length=96)]
