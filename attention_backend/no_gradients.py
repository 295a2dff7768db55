"""The refusal of gradients by functions that have none: without it a loss would train nothing, in silence."""

import torch
from torch import Tensor

from attention_backend.errors import UnsupportedError


def refuse_gradients(name: str, *tensors: Tensor | None) -> None:
    """Raises UnsupportedError if autograd would ask `name` for the gradient of one of the tensors."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise UnsupportedError(f"{name} has no gradient: call it under torch.no_grad() or with detached tensors")
