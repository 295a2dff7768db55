"""The refusal of gradients that nobody computes: without it a loss would train nothing, in silence."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attention_backend.errors import UnsupportedError


def refuse_gradients(name: str, *tensors: Tensor | None) -> None:
    """Raises UnsupportedError if autograd would ask `name` for the gradient of one of the tensors."""
    if any(is_asked_for(x) for x in tensors):
        raise UnsupportedError(f"{name} has no gradient: call it under torch.no_grad() or with detached tensors")
    refuse_tangents(name, tensors)


def refuse_tangents(name: str, values: Iterable[Any]) -> None:
    """Raises UnsupportedError if forward-mode AD follows one of the values, or of a list among them. Asks nothing of
    them where forward mode is off."""
    if forward_ad._current_level < 0:
        return
    for value in values:
        if isinstance(value, list | tuple):
            refuse_tangents(name, value)
        elif isinstance(value, Tensor) and _has_tangent(value):
            raise UnsupportedError(
                f"{name} has no forward-mode derivative (jvp, jacfwd, make_dual): where there are gradients, they are "
                "reverse mode only, by backward() and torch.autograd.grad"
            )


def refuse_transforms(name: str, values: Sequence[Any]) -> None:
    """Raises UnsupportedError for the transforms of torch.func that torch does not take an operator in Python through:
    `grad` of one of the values, or of a list among them; `vmap` where some are lists."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None:
        return
    lists = [value for value in values if isinstance(value, list | tuple)]
    tensors = [x for value in values for x in (value if isinstance(value, list | tuple) else [value])]
    wrappers = [wrapper for x in tensors if isinstance(x, Tensor) for wrapper in _wrappers(x)]
    if any(torch._C._functorch.is_gradtrackingtensor(x) and is_asked_for(x) for x in wrappers):
        raise UnsupportedError(
            f"{name} has no gradient by torch.func (grad, vjp, jacrev): ask for it by backward() or torch.autograd.grad"
        )
    if lists and any(torch._C._functorch.is_batchedtensor(x) for x in wrappers):
        raise UnsupportedError(f"{name} takes lists, which vmap does not map: call it once, for the whole batch")


def _wrappers(x: Tensor) -> Iterator[Tensor]:
    """torch.func's of a tensor, the outermost first."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        yield x
        x = torch._C._functorch.get_unwrapped(x)


def _has_tangent(x: Tensor) -> bool:
    while torch._C._functorch.is_batchedtensor(x):  # vmap's
        x = torch._C._functorch.get_unwrapped(x)
    return forward_ad.unpack_dual(x).tangent is not None


def is_asked_for(x: object) -> bool:
    """Whether autograd would ask for the gradient of `x`: also of a number that is handed in as a tensor."""
    return isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()
