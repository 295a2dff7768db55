"""Log-probabilities of a prompt's tokens as vLLM writes them (`prompt_logprobs`). Knows no endpoint."""

from collections.abc import Iterable

from pydantic import Field

from server.schemas.wire import WireModel
from server.text.details import TokenDetail


class PromptLogprob(WireModel):
    logprob: float
    rank: int = Field(ge=1)
    decoded_token: str = Field(max_length=65_536)


#: By token id; null: of the first token, before which there is nothing.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


def of_prompt(details: Iterable[TokenDetail]) -> PromptLogprobs:
    return [None if detail.is_first else _of_token(detail) for detail in details]


def _of_token(detail: TokenDetail) -> dict[str, PromptLogprob]:
    """The prompt's own token is the first, whether it is among the most likely ones or not. Its rank is one more than
    there are likelier tokens; those of the others are their places, which tell tokens that are alike apart."""
    found: dict[str, PromptLogprob] = {}
    for candidate in (detail.chosen, *detail.top):
        entry = PromptLogprob(logprob=candidate.logprob, rank=candidate.rank, decoded_token=candidate.text)
        found.setdefault(str(candidate.token_id), entry)
    return found
