"""Linear layers whose weights are laid out for oneDNN once, at load: on a CPU, decoding is bound by reading them.

MKL, torch's default for float32, runs one row on one core, and a handful of rows 2 to 4 times slower than oneDNN does
on AMD. Same arithmetic, another order of sums. Knows no model.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

#: Rows that the layout is chosen for. Layouts made for 8 to 64 rows serve one row and long prompts as well.
_TYPICAL_ROWS = 8
#: Between a power of two and the next one products have one of so many numbers of rows; up to 16 rows are as they are.
_KINDS = 8


class PackedLinear(nn.Module):
    """Inference only: y = x W^T + b, float32 or bfloat16, CPU. Its weight may lie in one layout with others: `join`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._rows = slice(0, linear.out_features)  # of the layout
        self._packed = _laid_out(linear.weight.detach())
        self._bias: Tensor | None = None if linear.bias is None else linear.bias.detach()

    @property
    def weight(self) -> Tensor:
        """A dense copy, for the few models that look at a layer's weight."""
        return self._packed.to_dense()[self._rows]

    @property
    def dtype(self) -> torch.dtype:
        return self._packed.dtype

    @property
    def bias(self) -> Tensor | None:
        return None if self._bias is None else self._bias[self._rows]

    def whole(self, x: Tensor) -> Tensor:
        """The products of all layers that lie together, `[..., sum of their out_features]`."""
        rows = x.reshape(-1, self.in_features)
        count = len(rows)
        if padding := padded_rows(count) - count:
            rows = nn.functional.pad(rows, (0, 0, 0, padding))
        products = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
        return products[:count].view(*x.shape[:-1], products.shape[-1])

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., in_features]` -> `[..., out_features]`."""
        return self.whole(x)[..., self._rows]

    def lies_with(self, other: "PackedLinear") -> bool:
        return self._packed is other._packed

    @staticmethod
    def join(layers: Sequence["PackedLinear"]) -> None:
        """Lays layers of one input out as one, below each other, unless they lie so; all have a bias, or none has."""
        first = layers[0]
        if all(layer.lies_with(first) for layer in layers):
            return
        packed = _laid_out(torch.cat([layer.weight for layer in layers]))
        biases = [layer.bias for layer in layers if layer.bias is not None]
        bias = torch.cat(biases) if biases else None
        end = 0
        for layer in layers:
            layer._rows = slice(end, end + layer.out_features)
            layer._packed, layer._bias, end = packed, bias, end + layer.out_features


def padded_rows(count: int) -> int:
    """How many rows a product of `count` rows is given, up to an eighth more. oneDNN compiles a product for each number
    of rows, and keeps some: without limits to those numbers one waits for it again and again, and a quicker answer
    tells that somebody's prompt was as long."""
    step = 1 << max(count.bit_length() - _KINDS.bit_length(), 0)
    return -(-count // step) * step


def _laid_out(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
    return packed


def pack_linears(model: nn.Module) -> int:
    """Replaces every nn.Linear of a model on a CPU, in place; returns how many. float32, and bfloat16 where the CPU has
    the instructions that oneDNN needs for it.

    A weight that another module shares (tied embeddings) stays there too.
    """
    if not torch.backends.mkldnn.is_available():
        return 0
    names = [name for name, module in model.named_modules() if _can_pack(module)]
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        model.set_submodule(name, PackedLinear(linear))
    return len(names)


def _dtypes() -> tuple[torch.dtype, ...]:
    bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return (torch.float32, torch.bfloat16) if bf16 else (torch.float32,)


def _can_pack(module: nn.Module) -> bool:
    # A subclass computes something else, and a forward hook would be lost.
    return (
        type(module) is nn.Linear
        and module.weight.dtype in _dtypes()
        and module.weight.device.type == "cpu"
        and not (module._forward_hooks or module._forward_pre_hooks)
    )
