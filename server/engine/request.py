"""One request inside the engine: its tokens, where they are in the KV cache, and when things happened. Knows no text,
no user and no other request."""

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from secrets import randbits

from models.batch import PromptLogprobs, SamplingParams
from server.engine.adapters import Adapter
from server.engine.messages import AddRequest, FinishReason, RequestTimes
from server.engine.token_ids import TokenIds


class RequestState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """Mutable; only the scheduler and the KV cache write to it."""

    __slots__ = (
        "adapter",
        "adapter_digest",
        "arrival_time",
        "block_hashes",
        "block_ids",
        "blocks_needed",
        "cache_salt",
        "chain",
        "entered_at",
        "first_token_time",
        "last_hits",
        "last_token_time",
        "max_length",
        "num_bypassed",
        "num_cached_tokens",
        "num_computed",
        "num_drafts",
        "num_filled",
        "num_in_flight",
        "num_preemptions",
        "num_prompt_tokens",
        "num_registered",
        "num_scored",
        "request_id",
        "sampling",
        "scheduled_time",
        "sequence_number",
        "slot",
        "state",
        "stop_token_ids",
        "token_ids",
        "twin_progress",
    )

    def __init__(
        self,
        message: AddRequest,
        *,
        sequence_number: int,
        eos_token_ids: Sequence[int],
        max_model_len: int,
        now: float,
        adapter: Adapter | None = None,
    ) -> None:
        self.request_id = message.request_id
        self.sampling = _with_seed(message.sampling)
        self.cache_salt = message.cache_salt
        self.adapter = adapter  # what the name meant when the request came
        self.adapter_digest = "" if adapter is None else adapter.digest  # empty: the base model
        self.sequence_number = sequence_number  # order of arrival: smaller is older
        self.token_ids = TokenIds(message.prompt_token_ids)  # prompt, then generated
        self.num_prompt_tokens = len(self.token_ids)
        self.max_length = min(self.num_prompt_tokens + self.sampling.max_tokens, max_model_len)
        eos = () if self.sampling.ignore_eos else eos_token_ids
        self.stop_token_ids = frozenset((*eos, *self.sampling.stop_token_ids))

        self.state = RequestState.WAITING
        self.slot = -1  # row in the runner's tables while it runs
        self.block_ids: list[int] = []
        self.num_computed = 0  # tokens whose K and V are in the blocks, or will be when the launched steps have run
        self.num_filled = 0  # of these, the ones of steps that have come back
        self.num_in_flight = 0  # sampled by a launched step and not read back yet
        self.num_drafts = 0  # guesses of a launched step that nobody has compared with what it sampled
        self.num_registered = 0  # blocks already offered to the prefix cache
        self.num_scored = 0  # tokens of the prompt, after its first, whose log-probabilities have come back
        self.block_hashes: list[bytes] = []  # chained, of full blocks
        self.chain = (b"", 0)  # hash and serial number of the cache entry that the next block is chained onto
        self.num_cached_tokens = -1  # prefix hit of the first admission; -1 before it

        self.num_preemptions = 0
        self.num_bypassed = 0  # younger requests admitted while this one did not fit
        self.blocks_needed = 0  # free blocks with which it could have started at the last look
        self.last_hits = -1  # blocks of it that were in the prefix cache at the last look; -1: never looked
        self.twin_progress = -1  # how far the older request with the same prefix was at the last look

        self.arrival_time = now  # in the engine: how long its body took to come is no wait of it here
        self.entered_at = 0.0  # predicted seconds of the steps that had been scheduled when it came
        self.scheduled_time = 0.0
        self.first_token_time = 0.0
        self.last_token_time = 0.0

    @property
    def was_admitted(self) -> bool:
        return self.num_cached_tokens >= 0

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """With those that the host has not read yet."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_remaining(self) -> int:
        """Tokens to run before the next one can be sampled."""
        return self.num_tokens - self.num_computed

    @property
    def awaits_its_end(self) -> bool:
        """Whether the token in flight is its last, whichever it is."""
        return self.num_in_flight > 0 and self.num_tokens >= self.max_length

    @property
    def num_reusable(self) -> int:
        """Tokens that may be found in the prefix cache: one at least is to be computed, and so is each after which a
        token of the prompt is still to be scored, for what follows from it is not in the cache."""
        return self.num_scored if self.is_to_be_scored else len(self.token_ids) - 1

    @property
    def wants_scores(self) -> bool:
        """Log-probabilities of the prompt's tokens."""
        return self.sampling.prompt_logprobs is not None

    @property
    def is_to_be_scored(self) -> bool:
        """Whether some of them have not come back yet."""
        return self.wants_scores and self.num_scored < self.num_prompt_tokens - 1

    def to_score(self, count: int) -> TokenIds:
        """Tokens of the prompt that follow the next `count` ones to run, if some of them were not scored before."""
        start, last = self.num_computed, self.num_prompt_tokens - 1
        end = min(start + count, last)
        return self.token_ids[start + 1 : end + 1] if end > max(start, self.num_scored) else TokenIds()

    def take_scores(self, first: int, scores: PromptLogprobs) -> list[PromptLogprobs] | None:
        """Those that are new, of the prompt's tokens from number `first` on (the first one is 0, and has none): after a
        preemption some are computed twice."""
        known = self.num_scored + 1 - first
        if known >= len(scores):
            return None
        self.num_scored += len(scores) - known
        return [scores.part(known, len(scores))]

    def append(self, token_ids: list[int]) -> tuple[list[int], FinishReason | None]:
        """Takes generated tokens up to the one that ends the request. Returns those taken, and why it has ended. Stop
        tokens count from min_tokens on; `stop` wins over `length`."""
        for count, token_id in enumerate(token_ids, 1):
            self.token_ids.append(token_id)
            if token_id in self.stop_token_ids and self.num_generated >= self.sampling.min_tokens:
                return token_ids[:count], "stop"
            if len(self.token_ids) >= self.max_length:
                return token_ids[:count], "length"
        return token_ids, None

    def times(self) -> RequestTimes:
        return RequestTimes(
            request_id=self.request_id,
            queued=self.arrival_time,
            scheduled=self.scheduled_time,
            first_token=self.first_token_time,
            last_token=self.last_token_time,
            num_prompt_tokens=self.num_prompt_tokens,
            num_generation_tokens=self.num_generated,
        )


def by_age(request: Request) -> int:
    """Sort key: oldest first."""
    return request.sequence_number


def _with_seed(sampling: SamplingParams) -> SamplingParams:
    """A seed for the whole life of the request: after a preemption it must draw what it would have drawn."""
    return replace(sampling, seed=randbits(63)) if sampling.seed is None else sampling
