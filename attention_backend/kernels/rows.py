"""Rows that kernels read 16 bytes at a time: checked once, for every launcher of layers. Knows no kernel."""

import torch
from torch import Tensor

from attention_backend.errors import UnsupportedError

VECTOR = 8  # 16-bit elements in 16 bytes
DTYPES = (torch.bfloat16, torch.float16)
_ALIGNMENT = 16
_PLAIN = (Tensor, torch.nn.Parameter)  # a subclass may hold other numbers than it says


def element_define(dtype: torch.dtype) -> tuple[str, int]:
    """The define that chooses a kernel's element type."""
    return "BF16", int(dtype == torch.bfloat16)


def begins_vectors(x: Tensor, elements: int) -> bool:
    """Whether every row (the last dimension) begins at 16 bytes, which are `elements` elements."""
    for dim, stride in enumerate(x.stride()[:-1]):
        if stride % elements and x.shape[dim] > 1:  # a dimension of one element may have any stride
            return False
    return x.data_ptr() % _ALIGNMENT == 0


def is_expanded(x: Tensor) -> bool:
    """Whether neighbours along a dimension lie in one place, which the TMA cannot read."""
    strides = x.stride()
    return min(strides) <= 0 and any(s <= 0 and n > 1 for s, n in zip(strides, x.shape, strict=True))


def is_copied(x: Tensor) -> bool:
    """Whether the TMA can read the rows of x `[rows, depth]`."""
    return x.stride(1) == 1 and not is_expanded(x) and begins_vectors(x, VECTOR)


def is_plain_weight(weight: Tensor) -> bool:
    """Whether the TMA can read a layer's weight as the numbers that it is."""
    return type(weight) in _PLAIN and weight.is_contiguous() and begins_vectors(weight, VECTOR)


def is_plain_bias(bias: Tensor) -> bool:
    """Whether a kernel can read a layer's bias as the numbers that it is."""
    return type(bias) in _PLAIN and bias.is_contiguous()


def check_rows(**tensors: Tensor) -> None:
    """Raises UnsupportedError for tensors whose last dimension cannot be read 8 elements at a time."""
    for name, x in tensors.items():
        if x.dtype not in DTYPES:
            raise UnsupportedError(f"{name} is {x.dtype}: fused layers on a GPU are in bfloat16 and float16")
        if x.stride(-1) != 1 or x.shape[-1] % VECTOR or not begins_vectors(x, VECTOR):
            raise UnsupportedError(
                f"{name} of shape {tuple(x.shape)}, strides {x.stride()}: rows are read {_ALIGNMENT} bytes at a time: "
                f"they must be contiguous, and begin and end at multiples of {VECTOR} elements"
            )
