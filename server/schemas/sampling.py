"""The sampling fields that chat and text completions share, each with OpenAI's or vLLM's bounds. null means default."""

from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from models.batch import SamplingParams
from server.errors import InvalidRequest
from server.schemas.wire import ModelName, RequestModel, TokenId
from server.settings import MAX_MODEL_LEN

MAX_N = 128  # OpenAI's; the server's own cap (settings.max_n) is lower
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_TOP_K = 1_000_000

Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenCount = Annotated[int, Field(ge=1, le=MAX_MODEL_LEN)]
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_LOGIT_BIAS),
]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]

HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
    }
)
VLLM_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "cache_salt": (),  # salts come from the API key: a caller must not choose whose cache it reads
    "detokenize": (True,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "priority": (0,),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}


class StreamOptions(RequestModel):
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"continuous_usage_stats": (False,)}
    harmless: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})

    include_usage: bool | None = None


class SamplingFields(RequestModel):
    harmless: ClassVar[frozenset[str]] = HARMLESS

    model: ModelName
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    max_tokens: TokenCount | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_MODEL_LEN)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOP_K, description="0 or -1: off.")] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _options_have_a_stream(self) -> "SamplingFields":
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed when stream is true.", param="stream_options")
        return self

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling_params(self, logprobs: int | None) -> SamplingParams:
        """`max_tokens` is left for whoever knows the prompt's length."""
        return SamplingParams(
            min_tokens=self.min_tokens or 0,
            temperature=1.0 if self.temperature is None else float(self.temperature),
            top_k=max(self.top_k or 0, 0),
            top_p=1.0 if self.top_p is None else float(self.top_p),
            min_p=float(self.min_p or 0),
            repetition_penalty=1.0 if self.repetition_penalty is None else float(self.repetition_penalty),
            presence_penalty=float(self.presence_penalty or 0),
            frequency_penalty=float(self.frequency_penalty or 0),
            logit_bias={int(token): float(bias) for token, bias in (self.logit_bias or {}).items()},
            seed=self.seed,
            logprobs=logprobs,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
        )
