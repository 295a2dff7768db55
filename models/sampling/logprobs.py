"""Log probabilities of sampled and most likely tokens, of the model's own distribution.

They are taken before biases, penalties, temperature and filters (vLLM's `raw_logprobs`, its default).
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from models.batch import TokenLogprobs
from models.copies import to_host


@dataclass(frozen=True, slots=True)
class LogprobRows:
    chosen: Tensor  # float32 [m]
    rank: Tensor  # int64 [m], 1 = most likely
    top_ids: Tensor  # int64 [m, k]
    top_logprobs: Tensor  # float32 [m, k]

    def on_host(self) -> "LogprobRows":
        """Copies that are complete when the current stream comes to here."""
        return LogprobRows(*(to_host(x) for x in (self.chosen, self.rank, self.top_ids, self.top_logprobs)))


def logprob_rows(raw_logits: Tensor, token_ids: Tensor, k: int) -> LogprobRows:
    """raw_logits float32 `[m, vocab]`, token_ids int64 `[m]`; k: the most alternatives any of these rows wants. It gets
    all that there are, of a smaller vocabulary."""
    total = raw_logits.logsumexp(-1, keepdim=True)
    chosen = raw_logits.gather(1, token_ids[:, None])
    top = raw_logits.topk(min(k, raw_logits.shape[1]))
    return LogprobRows(
        chosen=(chosen - total)[:, 0],
        rank=(raw_logits > chosen).sum(-1) + 1,
        top_ids=top.indices,
        top_logprobs=top.values - total,
    )


def to_rows(rows: LogprobRows, wanted: list[int]) -> list[TokenLogprobs]:
    """Of rows on the host. wanted: alternatives of each row, `[m]`, each at most the k of `logprob_rows`."""
    ids, values = rows.top_ids.numpy().astype(np.int32), rows.top_logprobs.numpy()
    return [
        TokenLogprobs(chosen, rank, of_ids[:k].tobytes(), of_values[:k].tobytes())
        for chosen, rank, of_ids, of_values, k in zip(
            rows.chosen.tolist(), rows.rank.tolist(), ids, values, wanted, strict=True
        )
    ]
