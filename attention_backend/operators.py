"""Defines the torch.library operators `longwave::*`. Knows no attention.

`torch.library.custom_op` does the same with less writing, but its operators check at every call what their results
alias, and the first call of any of them imports torch's compiler: seconds, in a process that compiles nothing.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attention_backend.errors import UnsupportedError
from attention_backend.no_gradients import refuse_tangents, refuse_transforms

_library = torch.library.Library("longwave", "FRAGMENT")


def unseen() -> bool:
    """Whether nobody would notice that an operator was not one: no gradients are recorded, nothing is traced. torch's
    way to a Python function costs as much as a few small products, of which a step on a CPU has hundreds."""
    return (
        not torch.compiler.is_compiling()
        and torch.is_inference_mode_enabled()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and forward_ad._current_level < 0
    )


def readable(x: Tensor) -> bool:
    """Whether the host may look at values of `x` for free: on the CPU, and nothing is traced, without values or of
    several calls at once (vmap)."""
    return (
        x.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
        and type(x).__torch_dispatch__ is Tensor.__torch_dispatch__  # else a FakeTensor, met outside of its mode
    )


class Operator:
    """An operator of every device, called as the function it was made from, `run`. `overload` is what torch knows."""

    def __init__(self, name: str, run: Callable[..., Any], mutates_args: tuple[str, ...]) -> None:
        self._name = f"longwave::{name}"
        self.run = run
        _library.define(name + torch.library.infer_schema(run, mutates_args=mutates_args))
        _library.impl(name, run, "CompositeExplicitAutograd")
        self.overload = getattr(torch.ops.longwave, name).default
        self._mutated = [at for at, each in enumerate(inspect.signature(run).parameters) if each in mutates_args]

    def __call__(self, *args: Any) -> Any:
        if unseen() and type(args[0]) is torch.Tensor and not args[0].is_meta:
            result = self.run(*args)
        else:
            refuse_tangents(self._name, args)
            refuse_transforms(self._name, args)
            result = self.overload(*args)
        if self._mutated and not torch.compiler.is_compiling():
            # What autograd saved of them is no longer what it was. (The compiler sees to it by the schema.)
            torch.autograd.graph.increment_version([args[at] for at in self._mutated])
        return result

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """Results without values, for the compiler."""
        torch.library.register_fake(self._name, fake, lib=_library)
        return fake

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[[Any, tuple[Any, ...], Any], None]
    ) -> None:
        torch.library.register_autograd(self._name, backward, setup_context=setup_context, lib=_library)

    def refuse_second_gradient(self) -> None:
        """Of an operator that computes gradients: they are constants for autograd, which says so instead of going on
        without them."""

        def refuse(ctx: Any, *gradients: Any) -> Any:
            del ctx, gradients
            raise UnsupportedError(
                f"{self._name} has no gradient of its own: what it is the gradient of is differentiable once, and "
                "create_graph=True asks for a second time"
            )

        self.register_autograd(refuse, setup_context=lambda ctx, inputs, output: None)  # noqa: ARG005


def operator(name: str, mutates_args: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Operator]:
    """Makes a function with annotated arguments the operator `longwave::name`."""

    def define(run: Callable[..., Any]) -> Operator:
        return Operator(name, run, mutates_args)

    return define
