"""Launches choose_tokens: one token per row of logits. Assumes that shapes were checked."""

import ctypes
from ctypes import c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from attention_backend.jit import load
from attention_backend.jit.spec import KernelVariant
from attention_backend.kernels import device, workspace

_THREADS = 256
_BLOCKS_PER_SM = 2
_MAX_PARTS = 32


class ChoiceParams(ctypes.Structure):
    """choose_tokens.cuh"""

    _fields_ = (
        *((n, c_void_p) for n in ("logits", "temperature", "keys", "winners", "counters", "tokens", "finite")),
        ("row_stride", c_int64),
        ("vocab_size", c_int),
        ("vectors", c_int),
    )


@cache
def choice_variant(dtype: torch.dtype, arch: str) -> KernelVariant:
    element = ("FP32", 1) if dtype == torch.float32 else ("BF16", int(dtype == torch.bfloat16))
    return KernelVariant("choose_tokens", arch, (element,), hot=True)


def choose(logits: Tensor, temperature: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids int64 `[rows]` and whether each row is finite, bool `[rows]`, of logits `[rows, vocab]`."""
    rows, vocab_size = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    finite = torch.empty(rows, dtype=torch.bool, device=logits.device)
    if rows == 0:
        return tokens, finite
    index = logits.device.index
    parts = max(1, min(_MAX_PARTS, device.num_sms(index) * _BLOCKS_PER_SM // rows))
    winners = torch.empty(rows * parts, dtype=torch.int64, device=logits.device)
    counters = workspace.counters(logits.device, rows)
    p = ChoiceParams(
        logits=logits.data_ptr(),
        temperature=temperature.data_ptr(),
        keys=keys.data_ptr(),
        winners=winners.data_ptr(),
        counters=counters.data_ptr(),
        tokens=tokens.data_ptr(),
        finite=finite.data_ptr(),
        row_stride=logits.stride(0),
        vocab_size=vocab_size,
        vectors=int(logits.data_ptr() % 16 == 0 and logits.stride(0) * logits.element_size() % 16 == 0),
    )
    load(choice_variant(logits.dtype, device.arch(index)), index)((rows, parts, 1), (_THREADS, 1, 1), p)
    return tokens, finite
