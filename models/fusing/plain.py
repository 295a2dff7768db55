"""Whether a module computes exactly what its class says: nothing was subclassed, hooked or replaced."""

from torch import nn


class NotFusedError(Exception):
    """Why a model, or a part of it, stays with its Hugging Face modules."""


def is_plain(module: nn.Module, cls: type[nn.Module]) -> bool:
    """PEFT and accelerate put a `forward` into the instance; others hook it or swap its class. Our adapters' own stands
    aside (`is_idle`) while no row of a step has one."""
    forward = module.__dict__.get("forward")
    return (
        type(module) is cls
        and (forward is None or getattr(forward, "is_idle", False))
        and not module._forward_hooks
        and not module._forward_pre_hooks
    )


def is_adapted_at_most(module: nn.Module, cls: type[nn.Module]) -> bool:
    """The same, or our adapters add to it (`add_to` of its `forward`)."""
    forward = module.__dict__.get("forward")
    return (
        type(module) is cls
        and (forward is None or hasattr(forward, "add_to"))
        and not module._forward_hooks
        and not module._forward_pre_hooks
    )
