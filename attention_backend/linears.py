"""Linear layers as a decoder's steps call them: on Hopper those of few rows stream their weights by a kernel of ours
(kernels/skinny_linear_sm90.cuh), gated ones of many rows are one kernel (kernels/gated_linear_sm90.cuh), all others are
torch's. All round where Hugging Face's modules round. No gradients: UnsupportedError where autograd asks for one. Knows
no model."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attention_backend import layers
from attention_backend.checks import check_device
from attention_backend.no_gradients import refuse_gradients
from attention_backend.operators import operator
from attention_backend.preparation import LinearStep

if TYPE_CHECKING:
    from attention_backend.heuristics.skinny_linear import SkinnyConfig


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias: x `[rows, depth]`, weight `[width, depth]`, bias `[width]` -> `[rows, width]`.

    In a CUDA graph that is being captured the weight may be read before the kernel in front has ended: none in the
    graph may write it.
    """
    _check(x, weight, bias)
    refuse_gradients("linear", x, weight, bias)
    out: Tensor = linear_op(x, weight, bias)
    return out


def gated_linear(x: Tensor, weight: Tensor, activation: str) -> Tensor:
    """act(x Wgate^T) * (x Wup^T) (Shazeer, arXiv 2002.05202): x `[rows, depth]`, weight `[2 width, depth]`, the gate's
    rows first -> `[rows, width]`; `activation` is one of layers.ACTIVATIONS. Of the weight in a graph: see `linear`."""
    if activation not in layers.ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(layers.ACTIVATIONS)}")
    _check(x, weight, None)
    if weight.shape[0] % 2:
        raise ValueError(f"weight {tuple(weight.shape)} is no gate and as many rows beside it")
    refuse_gradients("gated_linear", x, weight)
    out: Tensor = gated_linear_op(x, weight, activation)
    return out


def refuses(device: torch.device, dtype: torch.dtype, step: LinearStep) -> str | None:
    """Why few rows of this layer are torch's product there, in words; None: they have a kernel."""
    if device.type != "cuda":
        return "it is a kernel for Hopper GPUs"
    from attention_backend.kernels import skinny_linear as kernel

    return kernel.refuses(dtype, step.width, step.depth, device.index or 0, gated=step.activation is not None)


def refuses_many(device: torch.device, dtype: torch.dtype, step: LinearStep) -> str | None:
    """Why many rows of this layer are torch's products and an activation after them there, in words; None: they have a
    kernel, which serves the numbers of rows that fill its tiles."""
    if device.type != "cuda":
        return "it is a kernel for Hopper GPUs"
    if step.activation is None:
        return "they have a bias, or an activation that is not a fused one"
    from attention_backend.kernels import gated_linear as kernel

    return kernel.refuses(dtype, step.width, step.depth, device.index or 0)


@operator("linear")
def linear_op(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `linear`."""
    config = _config(x, weight, bias, gated=False)
    if config is None:
        return F.linear(x, weight, bias)
    from attention_backend.kernels.skinny_linear import skinny_linear

    return skinny_linear(x, weight, bias, config, early=torch.cuda.is_current_stream_capturing())


@linear_op.register_fake
def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ARG001
    return x.new_empty(x.shape[0], weight.shape[0])


@operator("gated_linear")
def gated_linear_op(x: Tensor, weight: Tensor, activation: str) -> Tensor:
    """See `gated_linear`."""
    config = _config(x, weight, None, gated=True)
    if config is not None:
        from attention_backend.kernels.skinny_linear import skinny_linear

        early = torch.cuda.is_current_stream_capturing()
        return skinny_linear(x, weight, None, config, activation=activation, early=early)
    if x.is_cuda:
        from attention_backend.kernels import gated_linear as kernel

        many = kernel.config_of(x, weight)
        if many is not None:
            return kernel.gated_linear(x, weight, many, activation)
    gate, up = F.linear(x, weight).chunk(2, dim=1)
    return layers.gated_activation_op(gate, up, activation)


@gated_linear_op.register_fake
def _gated_linear_fake(x: Tensor, weight: Tensor, *options: Any) -> Tensor:  # noqa: ARG001
    return x.new_empty(x.shape[0], weight.shape[0] // 2)


def _config(x: Tensor, weight: Tensor, bias: Tensor | None, *, gated: bool) -> "SkinnyConfig | None":
    if not x.is_cuda:
        return None
    from attention_backend.kernels.skinny_linear import config_of

    return config_of(x, weight, bias, gated=gated)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} must be [rows, depth] and weight {tuple(weight.shape)} [width, depth]")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)} does not fit a weight of {tuple(weight.shape)}")
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None:
            check_device(name, other, x.device)
            if other.dtype != x.dtype:
                raise TypeError(f"x is {x.dtype}, its {name} {other.dtype}")
