"""What the engine hands to the runner in one step, and what comes back. Token ids only: no strings, no users."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from models.shared_runs import NOT_SHARED, StepSharing

#: The base model alone.
NO_ADAPTER = -1
#: In place of a token id: what the step launched before samples for this slot, which only the device knows yet.
IN_FLIGHT = -1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request samples. Field names, ranges and meanings are OpenAI's and vLLM's."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None  # None: none; k: the sampled token's and the k most likely ones', 0 <= k <= 20
    prompt_logprobs: int | None = None  # the same of each token of the prompt but the first
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class ScheduledSeq(NamedTuple):
    """One sequence's share of a step. A tuple: it is made in a third of the time, and a step may have hundreds."""

    slot: int  # row of the runner's persistent tables; fixed while the request is known to the runner
    token_ids: Sequence[int]  # tokens to run now; the first alone may be IN_FLIGHT, before drafts or nothing
    num_computed: int  # tokens already in the KV cache
    block_ids: Sequence[int]  # the whole block table, new tokens' blocks included
    sample: bool  # whether the last of token_ids gives a next token (false for all but a prompt's last chunk)
    adapter_slot: int = NO_ADAPTER  # whose LoRA adapter changes its rows
    num_drafts: int = 0  # the last of token_ids are guesses: they and the token before them give a next token each


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Rows of a prompt after which the next token is known, and its log-probability wanted."""

    seq: int  # which of the batch
    targets: Sequence[int]  # what follows the first rows of the sequence: as many rows as there are targets
    num_top: int  # alternatives of each


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Sequences with one token first (decodes), then the others."""

    seqs: tuple[ScheduledSeq, ...]
    sharing: StepSharing = NOT_SHARED  # blocks that several of them have, to be read once
    scored: tuple[ScoredRows, ...] = ()  # in the order of seqs


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Bytes of arrays: a reader that stalls may have thousands of alternatives before it."""

    logprob: float  # of the sampled token
    rank: int  # of the sampled token, 1 = most likely
    top_ids: bytes = b""  # int32 [num_top], most likely first
    top_logprobs: bytes = b""  # float32 [num_top]

    @property
    def num_top(self) -> int:
        return len(self.top_ids) // 4

    @property
    def top(self) -> tuple[tuple[int, float], ...]:
        """Token id and log-probability of each alternative."""
        return tuple(zip(memoryview(self.top_ids).cast("i"), memoryview(self.top_logprobs).cast("f"), strict=True))


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of tokens of a prompt that follow each other. Bytes of arrays: a prompt may have a hundred thousand of them."""

    num_top: int  # alternatives of each
    logprobs: bytes  # float32 [n]: of the tokens themselves
    ranks: bytes  # int32 [n]: of the tokens themselves, 1 = most likely
    top_ids: bytes  # int32 [n, num_top], most likely first
    top_logprobs: bytes  # float32 [n, num_top]

    def __len__(self) -> int:
        return len(self.logprobs) // 4

    def part(self, start: int, end: int) -> "PromptLogprobs":
        """Of the tokens from `start` to `end - 1`."""
        width = 4 * self.num_top
        return PromptLogprobs(
            self.num_top,
            self.logprobs[4 * start : 4 * end],
            self.ranks[4 * start : 4 * end],
            self.top_ids[width * start : width * end],
            self.top_logprobs[width * start : width * end],
        )


@dataclass(frozen=True, slots=True)
class StepOutput:
    """A token for each sequence of the batch that had `sample`, and one for each of its drafts, in their order."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    finite: list[bool]  # false: this row's logits held NaN or Inf; its token must not be used
    prompt_logprobs: list[PromptLogprobs | None] = field(default_factory=list)  # of `scored`; None: NaN or Inf


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """What is known of a LoRA adapter that was read."""

    digest: str  # of its files: SHA-256, hexadecimal
    rank: int  # the largest of its layers
    num_layers: int  # linear layers that it changes
    base_model: str | None  # what it says it was trained for
    written: int  # when its weights were, in seconds since 1970
