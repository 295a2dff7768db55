"""The refusal of gradients that nobody computes: without it a loss would train nothing, in silence."""

import torch
from torch import Tensor

from attention_backend.errors import UnsupportedError


def refuse_gradients(name: str, *tensors: Tensor | None) -> None:
    """Raises UnsupportedError if autograd would ask `name` for the gradient of one of the tensors."""
    if any(is_asked_for(x) for x in tensors):
        raise UnsupportedError(f"{name} has no gradient: call it under torch.no_grad() or with detached tensors")


def is_asked_for(x: object) -> bool:
    """Whether autograd would ask for the gradient of `x`: also of a number that is handed in as a tensor."""
    return isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()
