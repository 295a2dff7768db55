"""Text deltas -> /v1/completions replies, whole or in chunks. Must not know sockets or SSE."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from server.schemas.chunk_template import ChunkTemplate
from server.schemas.completions import (
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
)
from server.schemas.packed_json import PackedJSON
from server.schemas.usage import IncludeUsage, UsageInfo
from server.schemas.whole_choice import WholeChoice, with_logprobs
from server.text.choice import TextDelta
from server.text.generation import Usage

CHOICES = b'"choices":['
NO_CHOICES = CHOICES + b"]"  # in a string the quotation marks would not stand alone


@dataclass(frozen=True, slots=True)
class CompletionReply:
    id: str
    model: str
    created: int
    echoes: Sequence[str]  # the prompt's text in front of each choice, or ""
    logprobs: bool
    include_usage: IncludeUsage
    n: int = 1  # choices of each prompt, of which the first knows the prompt's log-probabilities
    _templates: dict[int, ChunkTemplate] = field(default_factory=dict)  # by choice

    def opening(self, index: int, usage: Usage | None = None) -> Iterable[str]:
        if self.echoes[index]:
            yield self._chunk([CompletionChunkChoice(index=index, text=self.echoes[index])], usage)

    def chunks(self, delta: TextDelta, usage: Usage | None = None) -> Iterable[str]:
        text_only = delta.finish_reason is None and not (self.logprobs and delta.details)
        if text_only and delta.text:
            yield self._template(delta.index).fill(delta.text, usage)
        elif delta.text or not text_only:
            yield self._said(delta, usage)

    def _said(self, delta: TextDelta, usage: Usage | None) -> str:
        choice = CompletionChunkChoice(
            index=delta.index,
            text=delta.text,
            logprobs=CompletionLogprobs.of(delta.details) if self.logprobs and delta.details else None,
            finish_reason=delta.finish_reason,
        )
        return self._chunk([choice], usage)

    def closing(self, usage: Usage) -> Iterable[str]:
        if self.include_usage:
            yield self._chunk([], usage)

    def whole_choice(self, index: int) -> WholeChoice:
        return WholeChoice(index, CompletionLogprobs.of if self.logprobs else None)

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> Iterable[bytes | PackedJSON]:
        """Choice by choice: with what is echoed they may have a hundred megabytes together."""
        document = Completion(id=self.id, created=self.created, model=self.model, choices=[], usage=UsageInfo.of(usage))
        before, after = document.model_dump_json().encode().split(NO_CHOICES)
        yield before + CHOICES
        for at, choice in enumerate(choices):
            if at:
                yield b","
            said = CompletionChoice(
                index=choice.index,
                text=self.echoes[choice.index] + choice.text,
                finish_reason=choice.finish_reason,
            )
            logprobs = (choice.logprobs(), choices[at - at % self.n].prompt_logprobs())
            yield from with_logprobs(said.model_dump_json(), logprobs)
        yield b"]" + after

    def _template(self, index: int) -> ChunkTemplate:
        known = self._templates.get(index)
        if known is None:
            known = ChunkTemplate(lambda text: self._chunk([CompletionChunkChoice(index=index, text=text)]))
            self._templates[index] = known
        return known

    def _chunk(self, choices: list[CompletionChunkChoice], usage: Usage | None = None) -> str:
        told = None if usage is None else UsageInfo.of(usage)
        chunk = CompletionChunk(id=self.id, created=self.created, model=self.model, choices=choices, usage=told)
        return chunk.model_dump_json(exclude=None if self.include_usage else {"usage"})
