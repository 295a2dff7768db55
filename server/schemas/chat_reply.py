"""Text deltas -> /v1/chat/completions replies, whole or in chunks. Must not know sockets or SSE."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from server.schemas.chat import (
    AnswerMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChoiceLogprobs,
)
from server.schemas.chunk_template import ChunkTemplate
from server.schemas.packed_json import PackedJSON
from server.schemas.usage import IncludeUsage, UsageInfo
from server.schemas.whole_choice import WholeChoice, with_logprobs
from server.text.choice import TextDelta
from server.text.generation import Usage


@dataclass(frozen=True, slots=True)
class ChatReply:
    id: str
    model: str
    created: int
    logprobs: bool
    include_usage: IncludeUsage
    _templates: dict[int, ChunkTemplate] = field(default_factory=dict)  # by choice

    def opening(self, index: int, usage: Usage | None = None) -> Iterable[str]:
        yield self._chunk([ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))], usage)

    def chunks(self, delta: TextDelta, usage: Usage | None = None) -> Iterable[str]:
        """Text first, then a chunk of its own for the end, as OpenAI's. While readers stall, only strings are kept."""
        if delta.text or (self.logprobs and delta.details):
            yield self._said(delta, usage)
        if delta.finish_reason is not None:
            end = ChatChunkChoice(index=delta.index, delta=ChatDelta(), finish_reason=delta.finish_reason)
            yield self._chunk([end], usage)

    def _said(self, delta: TextDelta, usage: Usage | None) -> str:
        logprobs = ChoiceLogprobs.of(delta.details) if self.logprobs and delta.details else None
        if logprobs is None:
            return self._template(delta.index).fill(delta.text, usage)
        said = ChatDelta(content=delta.text)
        return self._chunk([ChatChunkChoice(index=delta.index, delta=said, logprobs=logprobs)], usage)

    def closing(self, usage: Usage) -> Iterable[str]:
        if self.include_usage:
            yield self._chunk([], usage)

    def whole_choice(self, index: int) -> WholeChoice:
        return WholeChoice(index, ChoiceLogprobs.of if self.logprobs else None)

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> Iterable[bytes | PackedJSON]:
        document = ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[
                ChatChoice(
                    index=choice.index,
                    message=AnswerMessage(content=choice.text),
                    logprobs=None,
                    finish_reason=choice.finish_reason or "stop",
                )
                for choice in choices
            ],
            usage=UsageInfo.of(usage),
        )
        logprobs = [*(choice.logprobs() for choice in choices), choices[0].prompt_logprobs()]
        return with_logprobs(document.model_dump_json(), logprobs)

    def _template(self, index: int) -> ChunkTemplate:
        known = self._templates.get(index)
        if known is None:
            known = ChunkTemplate(
                lambda text: self._chunk([ChatChunkChoice(index=index, delta=ChatDelta(content=text))])
            )
            self._templates[index] = known
        return known

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> str:
        told = None if usage is None else UsageInfo.of(usage)
        chunk = ChatCompletionChunk(id=self.id, created=self.created, model=self.model, choices=choices, usage=told)
        return chunk.model_dump_json(exclude=None if self.include_usage else {"usage"})
