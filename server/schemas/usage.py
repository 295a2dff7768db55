"""Token counts as OpenAI writes them. cached_tokens is what long-context callers look for."""

from typing import Literal

from pydantic import Field

from server.schemas.wire import WireModel
from server.text.generation import Usage

#: Which chunks of a stream have it: none, one at the end, or all of them, each what was used so far.
IncludeUsage = bool | Literal["continuous"]


class PromptTokensDetails(WireModel):
    cached_tokens: int = Field(0, ge=0)


class UsageInfo(WireModel):
    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=0)
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, usage: Usage) -> "UsageInfo":
        return cls(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
        )
