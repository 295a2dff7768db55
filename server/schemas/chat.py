"""/v1/chat/completions on the wire, both ways."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from server.errors import InvalidRequest
from server.schemas.labels import CacheOptions
from server.schemas.prompt_logprobs import PromptLogprobs
from server.schemas.sampling import MAX_TOP_LOGPROBS, VLLM_UNSUPPORTED, SamplingFields, TokenCount
from server.schemas.usage import UsageInfo
from server.schemas.wire import UNSUPPORTED_PART, UNUSED, RequestModel, Text, WireModel
from server.setting_types import TemplateVariables
from server.text.chat_template import ChatPrompt, Message
from server.text.choice import TextFinish
from server.text.details import Candidate, TokenDetail

MAX_MESSAGES = 10_000
MAX_PARTS = 1024


class TextPart(RequestModel):
    type: Literal["text"]
    text: Text
    prompt_cache_breakpoint: Annotated[CacheOptions | None, Field(description=UNUSED)] = None

    @model_validator(mode="before")
    @classmethod
    def _text_only(cls, part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("image_url", "input_audio", "file", "refusal", "video_url"):
            raise PydanticCustomError(UNSUPPORTED_PART, "content parts of type '{kind}' are not served", {"kind": kind})
        return part


class ChatMessage(RequestModel):
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "annotations": ([],),
        "audio": (),
        "function_call": (),
        "reasoning": ("",),
        "reasoning_content": ("",),
        "refusal": ("",),
        "tool_call_id": (),
        "tool_calls": ([],),
    }

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS)]
    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_-]+$")] | None = None

    def message(self) -> Message:
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return Message("system" if self.role == "developer" else self.role, text, self.name)


class ChatCompletionRequest(SamplingFields):
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = VLLM_UNSUPPORTED | {
        "add_special_tokens": (False,),
        "audio": (),
        "best_of": (1,),
        "chat_template": (),
        "continue_final_message": (False,),
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "include_reasoning": (True,),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "modalities": (["text"],),
        "moderation": (),
        "prediction": (),
        "reasoning_effort": ("none",),
        "response_format": ({"type": "text"},),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> "ChatCompletionRequest":
        if self.top_logprobs and not self.logprobs:  # 0 are what vLLM's clients may send always
            raise InvalidRequest("top_logprobs is only allowed when logprobs is true.", param="top_logprobs")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def prompt(self) -> ChatPrompt:
        generate = self.add_generation_prompt is not False
        return ChatPrompt(
            tuple(message.message() for message in self.messages), generate, self.chat_template_kwargs or {}
        )


class TopLogprob(WireModel):
    token: str = Field(max_length=65_536)
    logprob: float
    bytes: list[int]

    @classmethod
    def of(cls, candidate: Candidate) -> "TopLogprob":
        return cls(token=candidate.text, logprob=candidate.logprob, bytes=list(candidate.bytes))


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]

    @classmethod
    def of_detail(cls, detail: TokenDetail) -> "TokenLogprob":
        top = [TopLogprob.of(candidate) for candidate in detail.top]
        chosen = detail.chosen
        return cls(token=chosen.text, logprob=chosen.logprob, bytes=list(chosen.bytes), top_logprobs=top)


class ChoiceLogprobs(WireModel):
    content: list[TokenLogprob]
    refusal: None = None

    @classmethod
    def of(cls, details: tuple[TokenDetail, ...]) -> "ChoiceLogprobs":
        return cls(content=[TokenLogprob.of_detail(detail) for detail in details])


class AnswerMessage(WireModel):
    role: Literal["assistant"] = "assistant"
    content: str = Field(max_length=2**31)
    refusal: None = None


class ChatChoice(WireModel):
    index: int = Field(ge=0)
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: TextFinish


class ChatCompletion(WireModel):
    id: str = Field(max_length=64)
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(ge=0)
    model: str = Field(max_length=4096)
    choices: list[ChatChoice]
    usage: UsageInfo
    prompt_logprobs: PromptLogprobs | None = None


class ChatDelta(WireModel):
    """What a chunk does not say is absent, not null."""

    role: Literal["assistant"] | None = None
    content: str | None = None

    @model_serializer
    def _said(self) -> dict[str, str]:
        said = {"role": self.role, "content": self.content}
        return {name: value for name, value in said.items() if value is not None}


class ChatChunkChoice(WireModel):
    index: int = Field(ge=0)
    delta: ChatDelta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: TextFinish | None = None


class ChatCompletionChunk(WireModel):
    id: str = Field(max_length=64)
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int = Field(ge=0)
    model: str = Field(max_length=4096)
    choices: list[ChatChunkChoice]
    usage: UsageInfo | None = None
