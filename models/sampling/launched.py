"""Tokens that the device is choosing: what they will be when they have been read back. Knows no parameters."""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.batch import StepOutput, TokenLogprobs
from models.copies import to_host
from models.sampling.logprobs import LogprobRows, to_rows
from models.sampling.prompt_scores import PromptScores


@dataclass(frozen=True, slots=True)
class WantedLogprobs:
    rows: list[int]  # of the batch
    counts: list[int]  # alternatives that each wants
    values: LogprobRows  # on the host, once the step is over


class LaunchedSample:
    """The copies to the host are under way when it is made."""

    def __init__(self, token_ids: Tensor, finite: Tensor, logprobs: list[WantedLogprobs]) -> None:
        """token_ids int64 `[n]`, finite bool `[n]`, on the device."""
        self._token_ids, self._finite, self._logprobs = to_host(token_ids), to_host(finite), logprobs
        self._scores: PromptScores | None = None
        self._copied: torch.cuda.Event | None = None
        if token_ids.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def add(self, scores: PromptScores) -> None:
        """Of the same step, whose rows were all added before this was made."""
        self._scores = scores

    def is_done(self) -> bool:
        return self._copied is None or self._copied.query()

    def collect(self) -> StepOutput:
        """Waits until the tokens are there."""
        if self._copied is not None:
            self._copied.synchronize()
        token_ids: list[int] = self._token_ids.tolist()
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
        for wanted in self._logprobs:
            for row, value in zip(wanted.rows, to_rows(wanted.values, wanted.counts), strict=True):
                logprobs[row] = value
        scores = [] if self._scores is None else self._scores.collect()
        return StepOutput(token_ids, logprobs, self._finite.tolist(), scores)
