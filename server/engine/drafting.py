"""Which requests guess their next tokens in a step, and how many: drafts quoted from the request's own tokens, which
the model then checks all at once. Knows requests, no tensors and no clock.

A sampled token is a function of seed, position and logits, so the tokens of a step with drafts are accepted as far as
what was sampled is what was guessed, and the answer is the one without drafts (compare arXiv 2211.17192, where noise is
drawn anew). Whether drafts pay is learnt at no cost: guesses are made, and later compared, whether or not they ran."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from server.engine.prompt_lookup import PromptLookup
from server.engine.request import Request

LEARNING = 0.3  # weight of the latest guess in a mean
PRIOR = (0.0, 0.3, 0.7, 1.5)  # right tokens of a guess from a match of 0, 1, 2, 3 tokens, before any was compared
LONG_PRIOR = 3.0  # of a longer match
LONGEST_PAUSE = 32  # tokens without a look after guesses that were wrong from the first token on
LEAST_GAIN = 0.1  # of a step's tokens: costs and means are estimates
SORTED_TOKENS = 65_536  # of requests looked at for the first time in one step (one is always)
MEASURED = 0.2  # weight of the latest step in a time
FORGETTING = 0.002  # of what was measured, in each step without drafts: a bad cost is tried again some day
MOST_OFF = 8.0  # times the assumed cost that is believed: the first step of a kind may load kernels


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """What is guessed, and what it is assumed to cost here until it has been measured."""

    num_tokens: int = 7  # of a request in a step
    lookup_max: int = 4  # tokens of a match
    lookup_min: int = 2
    max_rows: int = 128  # of a step with drafts: up to there reading the weights takes longer than using them
    step_cost: float = 0.5  # of drafts at all, in steps without drafts
    row_cost: float = 0.01  # of every draft, the same
    overlaps: bool = False  # steps are launched before the one before is read: who drafted has to miss a turn


@dataclass(slots=True)
class DraftStats:
    num_drafts: int = 0  # sequences with drafts in a step
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Guess:
    start: int  # the place of its first token
    token_ids: list[int]
    match_length: int


class _History:
    """A request's guesses and how good they were."""

    def __init__(self, request: Request, limits: DraftLimits) -> None:
        self._tokens = request.token_ids
        self._lookup = PromptLookup(request.token_ids, shortest=limits.lookup_min, longest=limits.lookup_max)
        self._num_tokens = limits.num_tokens
        self._means: dict[int, float] = {}  # right tokens, by the length of the match
        self._guess: _Guess | None = None  # not compared yet
        self._num_wrong = 0  # in a row
        self._next_look = 0  # at so many tokens

    def guess(self, num_in_flight: int) -> tuple[list[int], float]:
        """Tokens after those in flight, and how many of them are expected to be right."""
        self._compare()
        if len(self._tokens) < self._next_look:
            return [], 0.0
        match = self._lookup.find()
        if match is None:
            return [], 0.0
        token_ids = self._lookup.continuation(match, num_in_flight + self._num_tokens)
        if self._guess is None:
            self._guess = _Guess(len(self._tokens) + num_in_flight, token_ids[num_in_flight:], match.length)
        expected = self._mean(match.length)
        count = min(self._num_tokens, int(2 * expected) + 1)  # more would hardly ever be right
        return token_ids[num_in_flight : num_in_flight + count], min(expected, count)

    def _mean(self, length: int) -> float:
        return self._means.get(length, PRIOR[length] if length < len(PRIOR) else LONG_PRIOR)

    def _compare(self) -> None:
        """What the last guess was worth, once that is known."""
        guess = self._guess
        if guess is None:
            return
        actual = self._tokens[guess.start : guess.start + len(guess.token_ids)]
        right = num_equal(guess.token_ids, actual)
        if right == len(actual) < len(guess.token_ids):
            return
        self._guess = None
        mean = self._mean(guess.match_length)
        self._means[guess.match_length] = mean + LEARNING * (right - mean)
        self._num_wrong = 0 if right else self._num_wrong + 1
        if self._num_wrong > 1:
            self._next_look = len(self._tokens) + min(2**self._num_wrong, LONGEST_PAUSE)


class _StepCost:
    """How much longer steps with drafts take, for one size of batch: as assumed, times what was measured of that."""

    def __init__(self, limits: DraftLimits) -> None:
        self._limits = limits
        self._factor = 1.0
        self._plain = 0.0  # seconds of a step without drafts

    def of(self, num_drafts: int) -> float:
        """In steps without drafts."""
        return self._factor * self._assumed(num_drafts)

    def observe(self, seconds: float, num_drafts: int) -> None:
        if num_drafts == 0:
            self._plain += (MEASURED if self._plain else 1.0) * (seconds - self._plain)
            self._factor += FORGETTING * (1.0 - self._factor)
        elif self._plain and self._assumed(num_drafts):
            measured = (seconds / self._plain - 1.0) / self._assumed(num_drafts)
            self._factor += MEASURED * (min(max(measured, 0.0), MOST_OFF) - self._factor)

    def _assumed(self, num_drafts: int) -> float:
        return self._limits.step_cost + self._limits.row_cost * num_drafts


class Drafter:
    def __init__(self, limits: DraftLimits) -> None:
        self.limits = limits
        self.stats = DraftStats()
        self._histories: dict[Request, _History] = {}
        self._costs: dict[int, _StepCost] = {}

    def propose(self, decodes: Sequence[Request], *, max_rows: int, beside_prompts: bool) -> dict[Request, list[int]]:
        """Drafts worth running in a step that has a row for each of the decodes, and no more than `max_rows` with them;
        `beside_prompts`: and rows of prompts, which make it so long that drafts cost next to nothing."""
        spare = min(self.limits.max_rows, max_rows) - len(decodes)
        if spare < len(decodes):
            return {}
        candidates = []
        num_sorted = 0
        for request in decodes:
            if _may_draft(request):
                history = self._histories.get(request)
                if history is None:
                    if num_sorted and num_sorted + request.num_tokens > SORTED_TOKENS:
                        continue
                    num_sorted += request.num_tokens
                    history = self._histories[request] = _History(request, self.limits)
                token_ids, expected = history.guess(request.num_in_flight)
                del token_ids[max(0, min(spare, request.max_length - request.num_tokens - 1)) :]
                if token_ids:
                    candidates.append((min(expected, len(token_ids)), token_ids, request))
        candidates.sort(key=lambda candidate: -candidate[0])
        cost = self._cost(len(decodes))
        best = num_drafts = 0
        gain, most = 0.0, LEAST_GAIN * len(decodes)
        for number, (expected, token_ids, _) in enumerate(candidates, 1):
            num_drafts += len(token_ids)
            if num_drafts > spare:
                break
            gain += expected
            lost = 0.0 if beside_prompts else cost.of(num_drafts) * len(decodes)  # tokens that all would have had
            if self.limits.overlaps and (beside_prompts or number < len(decodes)):
                lost += number  # a token in the turn that each misses; when all miss it, there is no such turn
            if gain - lost > most:
                best, most = number, gain - lost
        return {request: token_ids for _, token_ids, request in candidates[:best]}

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """The model has checked a sequence's drafts."""
        self.stats.num_drafts += 1
        self.stats.num_draft_tokens += num_drafts
        self.stats.num_accepted_tokens += num_accepted

    def observe(self, num_sequences: int, num_drafts: int, seconds: float) -> None:
        """A step of decodes alone took so long."""
        if seconds > 0:
            self._cost(num_sequences).observe(seconds, num_drafts)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._histories.pop(request, None)

    def _cost(self, num_sequences: int) -> _StepCost:
        return self._costs.setdefault(num_sequences.bit_length(), _StepCost(self.limits))


def num_equal(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """Leading tokens that are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafts, sampled, strict=False)))


def _may_draft(request: Request) -> bool:
    """Only once it decodes, and not with penalties: those count every token that was sampled, right or wrong."""
    sampling = request.sampling
    return (
        request.num_tokens > request.num_prompt_tokens
        and sampling.repetition_penalty == 1.0
        and sampling.presence_penalty == 0.0
        and sampling.frequency_penalty == 0.0
    )
