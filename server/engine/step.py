"""One step: put together from the requests that run, told to the runner, and what its rows were once it is launched.
Knows requests and who shares a prefix; not why these requests run, nor what becomes of their tokens."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import NamedTuple

from models.batch import IN_FLIGHT, NO_ADAPTER, ScheduledSeq, ScoredRows, StepBatch
from models.shared_runs import NOT_SHARED, Levels, StepSharing
from server.engine.request import Request, RequestState
from server.engine.sharing import PrefixSharing
from server.engine.step_time import StepWork, work_of
from server.engine.token_ids import TokenIds


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """Rows with one token first. `admitted` have new slots, which the runner must know before the step runs."""

    requests: list[Request]
    num_tokens: list[int]  # aligned with requests
    admitted: list[Request]
    work: StepWork  # what its time is predicted from
    sharing: StepSharing = NOT_SHARED
    drafts: dict[Request, list[int]] = field(default_factory=dict)  # guesses, among num_tokens, after the last token
    has_prompts: bool = True
    scored: dict[Request, TokenIds] = field(default_factory=dict)  # tokens of prompts that are scored in it

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens)

    def batch(self) -> StepBatch:
        """Block tables are passed by reference: the runner has read them before the scheduler touches them again."""
        seqs = []
        for request, count in zip(self.requests, self.num_tokens, strict=True):
            start = request.num_computed
            drafts = self.drafts.get(request, [])
            end = start + count - len(drafts)
            known = request.token_ids
            token_ids: Sequence[int] = known[start:end] if start < len(known) else [IN_FLIGHT]
            if drafts:
                token_ids = [*token_ids, *drafts]
            adapter_slot = NO_ADAPTER if request.adapter is None else request.adapter.slot
            sample = end == request.num_tokens
            seqs.append(
                ScheduledSeq(request.slot, token_ids, start, request.block_ids, sample, adapter_slot, len(drafts))
            )
        return StepBatch(tuple(seqs), self.sharing, tuple(self._scored_rows()) if self.scored else ())

    def _scored_rows(self) -> Iterator[ScoredRows]:
        for row, request in enumerate(self.requests):
            if request in self.scored:
                yield ScoredRows(row, self.scored[request], request.sampling.prompt_logprobs or 0)

    def living(self) -> "ScheduledStep":
        """Without rows whose requests have ended since it was scheduled."""
        return self._only([request.state is RequestState.RUNNING for request in self.requests])

    def halves(self) -> tuple["ScheduledStep", "ScheduledStep"]:
        first = [row < len(self.requests) // 2 for row in range(len(self.requests))]
        return self._only(first), self._only([not wanted for wanted in first])

    def _only(self, wanted: Sequence[bool]) -> "ScheduledStep":
        """Some rows alone, before the launch. Who shares with whom is forgotten: such steps are rare."""
        requests, num_tokens = list(compress(self.requests, wanted)), list(compress(self.num_tokens, wanted))
        contexts = (request.num_computed for request in requests)
        scored = {request: self.scored[request] for request in requests if request in self.scored}
        return replace(
            self,
            requests=requests,
            num_tokens=num_tokens,
            work=_scoring(work_of(zip(contexts, num_tokens, strict=True)), scored),
            sharing=NOT_SHARED,
            drafts={request: self.drafts[request] for request in requests if request in self.drafts},
            scored=scored,
        )


class LaunchedRow(NamedTuple):
    """What a row of a launched step was, when its result comes: the request may have ended or lost its blocks since."""

    request: Request
    end: int  # tokens of the request that were in its blocks after the step, without its drafts
    samples: bool
    num_preemptions: int  # of the request, at the launch
    drafts: Sequence[int] = ()  # of one that samples: as many tokens come besides its own, as if they were right
    first_scored: int = 0  # which of the prompt's tokens is the first that the step scores; 0: it scores none


class StepAssembly:
    """Puts rows into the order in which the runner takes them, and says what they do."""

    def __init__(self, block_size: int, sharing: PrefixSharing | None) -> None:
        self.block_size = block_size
        self.sharing = sharing
        self._read_share = 1.0  # of the keys of decodes, those that the last step read: shared ones are read once

    def decode_work(self, decodes: Sequence[Request], drafts: dict[Request, list[int]]) -> StepWork:
        """As far as it is known before the step is whole: with what decodes shared in the last one."""
        return StepWork(len(decodes) + sum(map(len, drafts.values())), 0, self._keys_read(_keys(decodes)))

    def assemble(
        self,
        decodes: Sequence[Request],
        drafts: dict[Request, list[int]],
        shares: Sequence[tuple[Request, int]],
        admitted: list[Request],
        work: StepWork,
    ) -> ScheduledStep:
        """Rows with one token first, and in both parts those that share a prefix side by side. `shares`: tokens of each
        prompt; `work`: of all rows, that of the decodes as decode_work() has it."""
        keys = _keys(decodes)
        work = work._replace(kv_tokens=work.kv_tokens - self._keys_read(keys) + keys)
        single = [request for request in decodes if request not in drafts]
        single += [request for request, count in shares if count == 1]  # the last tokens of prompts
        counts = {request: count for request, count in shares if count > 1}
        has_prompts = bool(counts or admitted)
        counts |= {request: 1 + len(token_ids) for request, token_ids in drafts.items()}
        several = list(counts)
        sharing = NOT_SHARED
        if self.sharing is not None:
            single, levels = self.sharing.arrange(single)
            shared = self.block_size * _repeated_blocks(levels)
            work = work._replace(kv_tokens=work.kv_tokens - shared)
            self._read_share = 1 - shared / max(1, _keys(single))
            sharing = StepSharing(levels)
            if len(several) > 1 and self.sharing.limits.prefills:
                several, prefill_levels = self.sharing.arrange(several, list(counts.values()))
                sharing = StepSharing(levels, prefill_levels)
        num_tokens = [1] * len(single) + [counts[request] for request in several]
        wanted = {request: request.to_score(count) for request, count in shares if request.wants_scores}
        scored = {request: token_ids for request, token_ids in wanted.items() if token_ids}
        work = _scoring(work, scored)
        return ScheduledStep(single + several, num_tokens, admitted, work, sharing, drafts, has_prompts, scored)

    def _keys_read(self, keys: int) -> int:
        return round(self._read_share * keys)


def _scoring(work: StepWork, scored: dict[Request, TokenIds]) -> StepWork:
    return work._replace(scored=sum(map(len, scored.values())))


def _keys(decodes: Iterable[Request]) -> int:
    """What they see, each for itself."""
    return sum(request.num_computed + 1 for request in decodes)


def _repeated_blocks(levels: Levels) -> int:
    """What is not read again because a level's runs read it once."""
    return sum((run.end - run.first - 1) * (run.stop - run.start) for level in levels for run in level)
