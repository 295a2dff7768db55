"""The sampling fields that chat and text completions share, each with OpenAI's or vLLM's bounds. null means default."""

from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from models.batch import SamplingParams
from server.errors import InvalidRequest, UnsupportedParameter
from server.schemas.labels import LabelFields
from server.schemas.sampling_defaults import (
    MinP,
    RepetitionPenalty,
    SamplingDefaults,
    Temperature,
    TopK,
    TopP,
)
from server.schemas.usage import IncludeUsage
from server.schemas.wire import UNUSED, ModelName, RequestModel, TokenId
from server.setting_types import few_keys
from server.settings import MAX_MODEL_LEN

MAX_N = 128  # OpenAI's; the server's own cap (settings.max_n) is lower
MAX_STOPS = 32  # OpenAI's are 4, vLLM's without end; tasks of lm-evaluation-harness have up to a dozen
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_TOP_LOGPROBS = 20  # OpenAI's of chats; vLLM's unless it is told otherwise

Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenCount = Annotated[int, Field(ge=1, le=MAX_MODEL_LEN)]
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_LOGIT_BIAS),
    few_keys(MAX_LOGIT_BIAS),
]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]

VLLM_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "cache_salt": (),  # salts come from the API key: a caller must not choose whose cache it reads
    "detokenize": (True,),
    "ec_transfer_params": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logprob_token_ids": (),
    "logits_processors": ([],),
    "priority": (0,),
    "repetition_detection": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "thinking_token_budget": (-1,),  # without end
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}


_SHAPING = tuple(SamplingDefaults.model_fields)


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: without include_usage it has no effect
    include_obfuscation: Annotated[bool | None, Field(description=UNUSED)] = None


class SamplingFields(LabelFields):
    model: ModelName
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    max_tokens: TokenCount | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_MODEL_LEN)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @field_validator("prompt_logprobs", mode="before")
    @classmethod
    def _not_of_the_whole_vocabulary(cls, value: Any) -> Any:
        """vLLM's -1, which it refuses, too, unless its operator allows for so many."""
        if value == -1:
            raise UnsupportedParameter(
                "prompt_logprobs is -1, which asks for the whole vocabulary. Only the prompt's own tokens with 0 to "
                f"{MAX_TOP_LOGPROBS} alternatives each are served.",
                param="prompt_logprobs",
            )
        return value

    @model_validator(mode="after")
    def _prompts_are_not_streamed(self) -> "SamplingFields":
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest(
                "`prompt_logprobs` are not available when `stream=True`.",  # vLLM's words
                param="prompt_logprobs",
            )
        return self

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
    def include_usage(self) -> IncludeUsage:
        options = self.stream_options
        if options is None or not options.include_usage:
            return False
        return "continuous" if options.continuous_usage_stats else True

    def sampling_params(self, logprobs: int | None, defaults: SamplingDefaults) -> SamplingParams:
        """`max_tokens` is left for whoever knows the prompt's length, `prompt_logprobs` for whoever knows whether it is
        echoed, and which choice is its first."""
        shaped = {name: getattr(defaults if getattr(self, name) is None else self, name) for name in _SHAPING}
        return SamplingParams(
            min_tokens=self.min_tokens or 0,
            temperature=float(shaped["temperature"]),
            top_k=max(shaped["top_k"], 0),
            top_p=float(shaped["top_p"]),
            min_p=float(shaped["min_p"]),
            repetition_penalty=float(shaped["repetition_penalty"]),
            presence_penalty=float(self.presence_penalty or 0),
            frequency_penalty=float(self.frequency_penalty or 0),
            logit_bias={int(token): float(bias) for token, bias in (self.logit_bias or {}).items()},
            seed=self.seed,
            logprobs=logprobs,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
        )
