"""The options of cells that are more than a shape: their names, what rows see under them, how many pairs that is.

Knows no cell, no contender and no device but that of the tensors it is given.
"""

from collections.abc import Callable
from itertools import pairwise
from random import Random

import torch
from torch import Tensor

#: Options of the features; `amount` is the window's keys (the row's own among them) or the cap.
WINDOW, SOFTCAP, SINKS, ALIBI = "sliding window", "softcap", "sinks", "ALiBi"
#: Patterns; `amount` is the window's keys, the prefix's keys, or the number of documents.
GLOBAL_WINDOW, PREFIX_LM, DOCUMENTS = "window and global tokens", "prefix-LM", "documents"
GLOBAL_TOKENS = 64  # the first ones, which every row sees

#: (rows, keys), broadcast against each other -> bool: which pairs are visible.
Sees = Callable[[Tensor, Tensor], Tensor]


def document_lengths(count: int, seqlen: int) -> list[int]:
    """Of so many documents that fill `seqlen`, cut at random places, which are always the same."""
    cuts = [0, *sorted(Random(0).sample(range(1, seqlen), count - 1)), seqlen]
    return [stop - start for start, stop in pairwise(cuts)]


def sees(option: str, amount: int, seqlen: int, device: torch.device) -> Sees:
    """The mask of a square of `seqlen` rows and keys; causal where the option says nothing of keys."""
    if option == WINDOW:
        return lambda row, key: (key <= row) & (key > row - amount)
    if option == GLOBAL_WINDOW:
        return lambda row, key: (key <= row) & ((key > row - amount) | (key < GLOBAL_TOKENS))
    if option == PREFIX_LM:
        return lambda row, key: (key <= row) | (key < amount)
    if option == DOCUMENTS:
        lengths = torch.tensor(document_lengths(amount, seqlen), device=device)
        ids = torch.repeat_interleave(torch.arange(amount, device=device), lengths)
        return lambda row, key: (key <= row) & (ids[row] == ids[key])
    return lambda row, key: key <= row


def pairs(option: str, amount: int, seqlen: int) -> int:
    """Visible pairs of that square; a causal one counts as its half, and so does each document."""
    half = seqlen * seqlen // 2
    if option in (WINDOW, GLOBAL_WINDOW):
        seen = min(seqlen, amount + (GLOBAL_TOKENS if option == GLOBAL_WINDOW else 0))
        return half - (seqlen - seen) ** 2 // 2
    if option == PREFIX_LM:
        return half + amount * amount // 2
    if option == DOCUMENTS:
        return sum(n * n for n in document_lengths(amount, seqlen)) // 2
    return half
