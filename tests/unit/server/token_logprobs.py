"""Log-probabilities of a sampled token, from numbers."""

from collections.abc import Sequence

import numpy as np

from models.batch import TokenLogprobs


def token_logprobs(logprob: float, top: Sequence[tuple[int, float]] = ()) -> TokenLogprobs:
    """top: token id and log-probability of each alternative, most likely first. The token itself has rank 1."""
    ids, values = [token for token, _ in top], [value for _, value in top]
    return TokenLogprobs(logprob, 1, np.asarray(ids, np.int32).tobytes(), np.asarray(values, np.float32).tobytes())
