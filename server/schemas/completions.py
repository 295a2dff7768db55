"""/v1/completions on the wire, both ways."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field, model_validator

from server.engine.token_ids import TokenIds
from server.errors import InvalidRequest, UnsupportedParameter
from server.schemas.prompt_logprobs import PromptLogprobs
from server.schemas.sampling import VLLM_UNSUPPORTED, SamplingFields
from server.schemas.usage import UsageInfo
from server.schemas.wire import MAX_TOKEN_IDS, MayBeLong, Text, TokenId, WireModel
from server.settings import MAX_MODEL_LEN
from server.text.choice import TextFinish
from server.text.details import TokenDetail

MAX_PROMPTS = 128
MAX_LOGPROBS = 5
DEFAULT_MAX_TOKENS = 16

TokenIdList = Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_TOKEN_IDS), MayBeLong]
Texts = Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
TokenIdLists = Annotated[list[TokenIdList], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]


class CompletionRequest(SamplingFields):
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = VLLM_UNSUPPORTED | {
        "add_special_tokens": (True,),
        "prompt_embeds": (),
        "response_format": ({"type": "text"},),
        "suffix": ("",),
    }

    prompt: Text | TokenIdList | Texts | TokenIdLists
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    max_tokens: Annotated[int, Field(ge=0, le=MAX_MODEL_LEN)] | None = None
    best_of: Annotated[int, Field(ge=1, le=20)] | None = None

    @model_validator(mode="after")
    def _served_combinations(self) -> "CompletionRequest":
        if self.best_of not in (None, self.choices):
            raise UnsupportedParameter("best_of is only served when it equals n.", param="best_of")
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise InvalidRequest(
                "max_tokens is 0, which is only allowed when echo is true, or with prompt_logprobs: there would be "
                "nothing to answer.",
                param="max_tokens",
            )
        return self

    @property
    def token_limit(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def prompts(self) -> tuple[str | TokenIds, ...]:
        if isinstance(self.prompt, str):
            return (self.prompt,)
        if isinstance(self.prompt[0], int):
            return (_packed(cast(Sequence[int], self.prompt)),)
        prompts = cast(list[str | Sequence[int]], self.prompt)
        return tuple(prompt if isinstance(prompt, str) else _packed(prompt) for prompt in prompts)


def _packed(prompt: Sequence[int]) -> TokenIds:
    return prompt if isinstance(prompt, TokenIds) else TokenIds(prompt)


class CompletionLogprobs(WireModel):
    """OpenAI's first logprobs: four lists side by side. Offsets are characters into the choice's text. null: of the
    first token of an echoed prompt, before which there is nothing."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

    @classmethod
    def of(cls, details: tuple[TokenDetail, ...]) -> "CompletionLogprobs":
        return cls(
            tokens=[detail.chosen.text for detail in details],
            token_logprobs=[None if detail.is_first else detail.chosen.logprob for detail in details],
            top_logprobs=[None if detail.is_first else _top(detail) for detail in details],
            text_offset=[detail.offset for detail in details],
        )


def _top(detail: TokenDetail) -> dict[str, float]:
    """The token that is there is always among them. Of tokens spelled alike (broken bytes) the likeliest stays."""
    top: dict[str, float] = {}
    for candidate in (*detail.top, detail.chosen):
        top.setdefault(candidate.text, candidate.logprob)
    return top


class CompletionChunkChoice(WireModel):
    index: int = Field(ge=0)
    text: str = Field(max_length=2**31)
    logprobs: CompletionLogprobs | None = None
    finish_reason: TextFinish | None = None


class CompletionChoice(CompletionChunkChoice):
    prompt_logprobs: PromptLogprobs | None = None


class CompletionHead(WireModel):
    id: str = Field(max_length=64)
    object: Literal["text_completion"] = "text_completion"
    created: int = Field(ge=0)
    model: str = Field(max_length=4096)


class Completion(CompletionHead):
    choices: list[CompletionChoice]
    usage: UsageInfo


class CompletionChunk(CompletionHead):
    choices: list[CompletionChunkChoice]
    usage: UsageInfo | None = None
