"""A prompt's log-probabilities on their way to its choices: it is scored with the first of them, and where it is echoed
they stand in front of what each of them says. Must not know the wire format, the choices' text or the engine."""

import asyncio
from collections.abc import Iterator, Sequence

from models.batch import PromptLogprobs
from server.text.choice import TextDelta
from server.text.details import PromptDetails, TokenDetail


class ScoredPrompt:
    """Feed it all that comes with the first choice, in order, until that has its own first token."""

    def __init__(self, details: PromptDetails, choices: range, *, echoed: int | None, told_apart: int | None) -> None:
        """`choices`: the indices of all that the prompt has. `echoed`: alternatives that each of them shows with the
        prompt's tokens; `told_apart`: those that are told beside the choices, and so with the first one alone."""
        self.choices = choices
        self.was_told = asyncio.Event()  # all that choices show: then they may say what is their own
        self._details = details
        self._echoed = echoed
        self._told_apart = told_apart
        if echoed is None:
            self.was_told.set()

    def feed(self, logprobs: Sequence[PromptLogprobs]) -> Iterator[TextDelta]:
        """What is said with each choice."""
        details = tuple(self._details.feed(logprobs))
        if not details:
            return
        echoed = _with_top(details, self._echoed)
        for index in self.choices:
            apart = _with_top(details, self._told_apart) if index == self.choices[0] else ()
            if echoed or apart:
                yield TextDelta(index, "", echoed, prompt_details=apart)


def _with_top(details: Sequence[TokenDetail], count: int | None) -> tuple[TokenDetail, ...]:
    """With so many alternatives each; None: nobody asked for them."""
    return () if count is None else tuple(detail.of_top(count) for detail in details)
