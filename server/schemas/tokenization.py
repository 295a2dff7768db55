"""/tokenize and /detokenize on the wire: vLLM's shapes."""

from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, model_validator

from server.errors import InvalidRequest, UnsupportedParameter
from server.schemas.chat import MAX_MESSAGES, ChatMessage
from server.schemas.wire import MAX_TOKEN_IDS, MayBeLong, ModelName, RequestModel, Text, TokenId, WireModel
from server.setting_types import TemplateVariables
from server.text.chat_template import ChatPrompt


class TokenizeRequest(RequestModel):
    """A prompt, or messages. A chat template brings its own special tokens, so the defaults differ."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "chat_template": (),
        "continue_final_message": (False,),
        "mm_processor_kwargs": ({},),
        "tools": ([],),
    }

    model: ModelName | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("Give either prompt or messages.", param="prompt")
        if self.messages is None and self.chat_template_kwargs:
            message = "chat_template_kwargs is for messages: a prompt has no template."
            raise InvalidRequest(message, param="chat_template_kwargs")
        if self.messages is not None and self.add_special_tokens:
            message = "add_special_tokens is not served with messages: the chat template decides."
            raise UnsupportedParameter(message, param="add_special_tokens")
        return self

    def text(self) -> str | ChatPrompt:
        if self.messages is None:
            return self.prompt or ""
        generate = self.add_generation_prompt is not False
        return ChatPrompt(
            tuple(message.message() for message in self.messages), generate, self.chat_template_kwargs or {}
        )


class TokenizeReply(WireModel):
    """`token_strs` is there when it was asked for."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=False)

    count: int = Field(ge=0)
    max_model_len: int = Field(ge=1)
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestModel):
    model: ModelName | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_TOKEN_IDS), MayBeLong]


class DetokenizeReply(WireModel):
    prompt: str = Field(max_length=2**31)
