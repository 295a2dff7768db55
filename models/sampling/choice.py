"""One token per row of logits by temperature and noise alone: the kernel on a GPU, torch on a CPU. Knows no slot."""

import numpy as np
import torch
from torch import Tensor

import attention_backend
from models.copies import to_device
from models.sampling.noise import log_exponential
from models.sampling.parameters import GREEDY_TEMPERATURE

#: Rows are worked on in pieces of at most this many logits, which bounds the float32 temporaries (128 MiB each).
MAX_LOGITS_PER_PIECE = 1 << 25


def choose(logits: Tensor, temperature: np.ndarray, keys: np.ndarray) -> tuple[Tensor, Tensor]:
    """Token ids int64 `[n]` and whether each row's logits are all finite, bool `[n]`.

    logits `[n, vocab]` (any float dtype, not changed), temperature float32 `[n]` (greedy below GREEDY_TEMPERATURE),
    keys int32 `[n, 2]` of noise.row_keys.
    """
    if logits.is_cuda:
        device = logits.device
        return attention_backend.choose_tokens(logits, to_device(temperature, device), to_device(keys, device))
    finite = logits.sum(-1, dtype=torch.float32).isfinite()  # NaN and Inf both survive a sum
    greedy = temperature < GREEDY_TEMPERATURE
    if greedy.all():
        return logits.argmax(-1), finite
    if not greedy.any():
        return _draw(logits, temperature, keys), finite
    token_ids = logits.argmax(-1)
    random = np.flatnonzero(~greedy)
    where = torch.from_numpy(random)
    return token_ids.index_copy_(0, where, _draw(logits[where], temperature[random], keys[random])), finite


def _draw(logits: Tensor, temperature: np.ndarray, keys: np.ndarray) -> Tensor:
    rows = max(1, MAX_LOGITS_PER_PIECE // logits.shape[1])
    drawn = []
    for start in range(0, len(logits), rows):
        piece = slice(start, start + rows)
        scores = logits[piece].float() / torch.from_numpy(temperature[piece])[:, None]
        drawn.append(scores.sub_(log_exponential(torch.from_numpy(keys[piece]), logits.shape[1])).argmax(-1))
    return torch.cat(drawn)
