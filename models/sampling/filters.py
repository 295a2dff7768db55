"""min-p, top-k and top-p as one threshold per row: tokens below it get -inf. Knows no requests.

Order and meaning are vLLM's: min-p first, then top-k, then top-p over what top-k left. Tokens that tie with the
threshold all stay, so the result never depends on how a sort orders equals.
"""

import torch
from torch import Tensor

#: Candidates looked at before a row is sorted in full (only where reading one flag back costs nothing: on the CPU).
_PREFIXES = (1024, 8192)


def apply_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """In place. logits `[n, vocab]` (after temperature), min_p `[n]`: keep p >= min_p * max p. 0 keeps everything."""
    threshold = logits.amax(-1) + min_p.log()
    return logits.masked_fill_(logits < threshold[:, None], -torch.inf)


def apply_top_k_top_p(logits: Tensor, top_k: Tensor, top_p: Tensor, *, largest_k: int | None) -> Tensor:
    """In place. logits `[n, vocab]` (after temperature), top_k int64 `[n]` (>= 1; vocab = off), top_p `[n]`.

    `largest_k`: the largest of top_k if the caller knows it to be small, so that no row needs a full sort.
    """
    vocab_size = logits.shape[1]
    total = logits.logsumexp(-1)
    if largest_k is not None:
        candidates = logits.topk(min(largest_k, vocab_size)).values
        threshold, _ = _thresholds(candidates, total, top_k, top_p, vocab_size)
    elif logits.device.type == "cpu":
        threshold = _thresholds_by_prefixes(logits, total, top_k, top_p)
    else:
        ordered = logits.sort(-1, descending=True).values
        threshold, _ = _thresholds(ordered, total, top_k, top_p, vocab_size)
    return logits.masked_fill_(logits < threshold[:, None], -torch.inf)


def _thresholds_by_prefixes(logits: Tensor, total: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    vocab_size = logits.shape[1]
    threshold = torch.empty_like(total)
    rows = torch.arange(len(logits))
    for width in (*(prefix for prefix in _PREFIXES if prefix < vocab_size), vocab_size):
        left = logits if len(rows) == len(logits) else logits[rows]
        ordered = left.topk(width).values if width < vocab_size else left.sort(-1, descending=True).values
        threshold[rows], covered = _thresholds(ordered, total[rows], top_k[rows], top_p[rows], vocab_size)
        rows = rows[~covered]
        if rows.numel() == 0:
            break
    return threshold


def _thresholds(ordered: Tensor, total: Tensor, top_k: Tensor, top_p: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """The smallest logit that stays, `[n]`, and whether `ordered` (the largest logits, descending) sufficed to tell."""
    width = ordered.shape[1]
    mass = (ordered - total[:, None]).exp_().cumsum(-1)  # of the first i + 1 tokens
    last_of_k = (top_k - 1).clamp(max=width - 1)
    # Top-p is over what top-k left, so its whole is the mass of the first k.
    whole = torch.where(top_k < vocab_size, mass.gather(1, last_of_k[:, None])[:, 0], 1.0)
    # The token that crosses top_p stays: the number of prefixes that fall short of it is its index.
    short = (mass < (top_p * whole)[:, None]).sum(-1)
    last_of_p = torch.where(top_p < 1.0, short, width)
    covered = (top_k <= width) | ((top_k == vocab_size) & (last_of_p < width))
    last = torch.minimum(last_of_k, last_of_p.clamp(max=width - 1))
    return ordered.gather(1, last[:, None])[:, 0], covered
