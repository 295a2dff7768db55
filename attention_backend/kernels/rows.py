"""Rows that kernels read 16 bytes at a time: checked once, for every launcher of layers. Knows no kernel."""

import torch
from torch import Tensor

from attention_backend.errors import UnsupportedError

VECTOR = 8  # 16-bit elements in 16 bytes
DTYPES = (torch.bfloat16, torch.float16)
_ALIGNMENT = 16


def element_define(dtype: torch.dtype) -> tuple[str, int]:
    """The define that chooses a kernel's element type."""
    return "BF16", int(dtype == torch.bfloat16)


def check_rows(**tensors: Tensor) -> None:
    """Raises UnsupportedError for tensors whose last dimension cannot be read 8 elements at a time."""
    for name, x in tensors.items():
        if x.dtype not in DTYPES:
            raise UnsupportedError(f"{name} is {x.dtype}: fused layers on a GPU are in bfloat16 and float16")
        odd = any(s % VECTOR for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1)
        if odd or x.stride(-1) != 1 or x.data_ptr() % _ALIGNMENT or x.shape[-1] % VECTOR:
            raise UnsupportedError(
                f"{name} of shape {tuple(x.shape)}, strides {x.stride()}: rows are read {_ALIGNMENT} bytes at a time: "
                f"they must be contiguous, and begin and end at multiples of {VECTOR} elements"
            )
