"""Linear layers over the same rows as one product over one packed weight, of which their own weights become views, or
parts where it is laid out for oneDNN.

Whatever is neither (adapters, quantised weights, hooks) is called as the module it is. Every call looks at that,
because adapters come after a model was loaded.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attention_backend.linears import linear
from attention_backend.preparation import LinearStep
from models.fusing.plain import is_adapted_at_most, is_plain
from models.packed_linear import PackedLinear


class JoinedLinears:
    """Several linear layers of the same input, or one that is several already (Phi-3)."""

    def __init__(self, modules: Sequence[nn.Module], sizes: Sequence[int], *, pack: bool) -> None:
        """`sizes`: of the outputs, which are one a module, or all of the only module's; none: that has one output."""
        self.modules: tuple[Any, ...] = tuple(modules)
        self._sizes = list(sizes)
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        self._pointers: tuple[int, ...] = ()
        if not pack or len(self.modules) == 1 or self.refuses() is not None:
            return
        if self._kind is PackedLinear:
            PackedLinear.join(self.modules)
        else:
            self._weight = packed([module.weight for module in self.modules])
            if self.modules[0].bias is not None:
                self._bias = packed([module.bias for module in self.modules])
            self._pointers = self._present_pointers()

    def refuses(self) -> str | None:
        """Why these are not one product; None: they can be."""
        for module in self.modules:
            if not self._is_known(module):
                kind = type(module).__name__
                return f"{kind} with hooks or an adapter" if type(module) is self._kind else f"they are {kind}"
        first = self.modules[0]
        for module in self.modules[1:]:
            if facts(module) != facts(first):
                return "their weights differ in dtype, device or width"
            if (module.bias is None) != (first.bias is None):
                return "some have a bias and some have none"
        return None

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """x `[rows, in_features]` -> `[rows, size]` of each size, views of one tensor where it is one."""
        if (whole := self.whole) is not None:
            return self.split(linear(x, *whole))
        if len(self.modules) == 1:
            return self.split(self.modules[0](x))
        if self._lie_together():
            parts = self.split(self.modules[0].whole(x))
            for module, part in zip(self.modules, parts, strict=True):
                if (adapter := module.__dict__.get("forward")) is not None:
                    adapter.add_to(part, x)
            return parts
        return tuple(module(x) for module in self.modules)

    def split(self, products: Tensor) -> tuple[Tensor, ...]:
        """`[rows, all outputs]` -> `[rows, size]` of each size."""
        return products.split(self._sizes, dim=1) if self._sizes else (products,)

    @property
    def whole(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight `[all outputs, in_features]` and bias of the one product that these are; None: they are none now."""
        if len(self.modules) == 1:
            module = self.modules[0]
            return (module.weight, module.bias) if is_plain(module, nn.Linear) else None
        if self._weight is not None and self._still_packed():
            return self._weight, self._bias
        return None

    def step(self, activation: str | None = None) -> LinearStep | str:
        """The one product that these are on a GPU, packed or still to be, or why they are none. `activation`: of a gate
        and what it multiplies, which is in the product's kernel where they have no biases."""
        reason = self.refuses()
        if reason is not None or self._kind is PackedLinear:
            return reason or "they are laid out for a CPU"
        first, rows = self.modules[0], sum(int(module.weight.shape[0]) for module in self.modules)
        return LinearStep(rows, int(first.weight.shape[1]), activation if first.bias is None else None)

    @property
    def _kind(self) -> type[nn.Module]:
        return PackedLinear if type(self.modules[0]) is PackedLinear else nn.Linear

    def _lie_together(self) -> bool:
        first = self.modules[0]
        return self._kind is PackedLinear and all(
            self._is_known(module) and module.lies_with(first) for module in self.modules
        )

    def _is_known(self, module: nn.Module) -> bool:
        """Adapters add to parts of a layout as they are; with them, weights that are one product are called apart."""
        return (is_adapted_at_most if self._kind is PackedLinear else is_plain)(module, self._kind)

    def _still_packed(self) -> bool:
        plain = all(is_plain(module, nn.Linear) for module in self.modules)
        return plain and self._present_pointers() == self._pointers

    def _present_pointers(self) -> tuple[int, ...]:
        return tuple(x.data_ptr() for module in self.modules for x in (module.weight, module.bias) if x is not None)


def one_linear(module: nn.Module) -> JoinedLinears:
    """Of an input of its own."""
    return JoinedLinears((module,), (), pack=False)


def facts(module: Any) -> tuple[torch.dtype, torch.device, int]:
    """Of a linear layer's weight: dtype, device, width of its input."""
    if type(module) is PackedLinear:  # its dense weight is made when it is asked for
        return module.dtype, torch.device("cpu"), module.in_features
    return module.weight.dtype, module.weight.device, module.weight.shape[1]


@torch.no_grad()
def packed(parameters: Sequence[Tensor]) -> Tensor:
    """The parameters below each other, in one tensor; they become views of it, and what they had is freed.

    Parameters that lie so already are not copied.
    """
    found = _lying_together(parameters)
    if found is not None:
        return found
    together = torch.cat([parameter.detach() for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = together[start : start + parameter.shape[0]]
        start += parameter.shape[0]
    return together


def _lying_together(parameters: Sequence[Tensor]) -> Tensor | None:
    first = parameters[0]
    end = first.storage_offset()
    for parameter in parameters:
        same = parameter.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or parameter.storage_offset() != end or not parameter.is_contiguous():
            return None
        end += parameter.numel()
    rows = sum(parameter.shape[0] for parameter in parameters)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
