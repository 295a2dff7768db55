"""One token per row of logits, on a GPU in one launch: greedy, or drawn with noise that is a hash. Knows no request."""

import torch
from torch import Tensor

from attention_backend.checks import check_tensor
from attention_backend.errors import UnsupportedError
from attention_backend.operators import operator

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def choose_tokens(logits: Tensor, temperature: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """argmax_i(logits_i / temperature - log E_i) of each row, with E_i ~ Exp(1) a hash of the row's key and i: a draw
    from softmax(logits / temperature). Rows with a temperature below 1e-5 are greedy.

    logits `[rows, vocab]` with contiguous rows, temperature float32 `[rows]`, keys int32 `[rows, 2]`, all on one CUDA
    device. Returns token ids int64 `[rows]` and, bool `[rows]`, whether all logits of a row are finite. Waits for
    nothing, so a CUDA graph may record it. Raises UnsupportedError elsewhere than on a GPU.
    """
    if not logits.is_cuda:
        raise UnsupportedError(f"tokens are chosen by a kernel on CUDA devices only, not on {logits.device}")
    if logits.dim() != 2 or logits.dtype not in _DTYPES or logits.stride(1) != 1:
        raise UnsupportedError(f"logits must be [rows, vocab] with contiguous rows in one of {_DTYPES}")
    rows = logits.shape[0]
    check_tensor("temperature", temperature, torch.float32, (rows,), logits.device)
    check_tensor("keys", keys, torch.int32, (rows, 2), logits.device)
    if not (temperature.is_contiguous() and keys.is_contiguous()):
        raise UnsupportedError("temperature and keys must be contiguous")
    tokens, finite = choose_tokens_op(logits, temperature, keys)
    return tokens, finite


@operator("choose_tokens")
def choose_tokens_op(logits: Tensor, temperature: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """See `choose_tokens`."""
    from attention_backend.kernels import choose_tokens as kernel

    return kernel.choose(logits, temperature, keys)


@choose_tokens_op.register_fake
def _choose_tokens_fake(logits: Tensor, temperature: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    rows = logits.shape[0]
    return logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows, dtype=torch.bool)
