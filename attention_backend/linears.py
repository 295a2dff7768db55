"""Linear layers as a decoder's steps call them: on Hopper those of few rows stream their weights by a kernel of ours
(kernels/skinny_linear_sm90.cuh), many rows of gated ones, and of those whose results are added to a residual, are one
kernel (kernels/gemm_sm90.cuh), all others are torch's. All round where Hugging Face's modules round. No gradients:
UnsupportedError where autograd asks for one. Knows no model."""

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
    from attention_backend.heuristics.gemm import GemmConfig
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


def added_linear(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """residual + x W^T: x `[rows, depth]`, weight `[width, depth]`, residual `[rows, width]` -> `[rows, width]`."""
    _check(x, weight, None)
    if residual.shape != (x.shape[0], weight.shape[0]) or residual.dtype != x.dtype:
        raise ValueError(f"residual {tuple(residual.shape)} {residual.dtype} fits no x {tuple(x.shape)} {x.dtype}")
    check_device("residual", residual, x.device)
    refuse_gradients("added_linear", x, weight, residual)
    out: Tensor = added_linear_op(x, weight, residual)
    return out


def adds(x: Tensor, weight: Tensor, residual: Tensor) -> bool:
    """Whether `added_linear` of these is one kernel. Where not, a norm that follows had better take the sum with it."""
    return _gemm_config(x, weight, residual) is not None


def refuses(device: torch.device, dtype: torch.dtype, step: LinearStep) -> str | None:
    """Why few rows of this layer are torch's product there, in words; None: they have a kernel."""
    if device.type != "cuda":
        return "it is a kernel for Hopper GPUs"
    from attention_backend.kernels import skinny_linear as kernel

    return kernel.refuses(dtype, step.width, step.depth, device.index or 0, gated=step.activation is not None)


def refuses_many(device: torch.device, dtype: torch.dtype, step: LinearStep) -> str | None:
    """Why many rows of this layer, which is gated or adds to a residual, are torch's product and kernels after it
    there, in words; None: they have a kernel, which serves the numbers of rows that fill its tiles."""
    if device.type != "cuda":
        return "it is a kernel for Hopper GPUs"
    from attention_backend.kernels import gemm as kernel

    return kernel.refuses(dtype, step.width, step.depth, device.index or 0, gated=step.activation is not None)


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
    many = _gemm_config(x, weight)
    if many is not None:
        from attention_backend.kernels.gemm import gemm

        return gemm(x, weight, many, activation=activation)
    gate, up = F.linear(x, weight).chunk(2, dim=1)
    return layers.gated_activation_op(gate, up, activation)


@gated_linear_op.register_fake
def _gated_linear_fake(x: Tensor, weight: Tensor, *options: Any) -> Tensor:  # noqa: ARG001
    return x.new_empty(x.shape[0], weight.shape[0] // 2)


@operator("added_linear")
def added_linear_op(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """See `added_linear`."""
    config = _gemm_config(x, weight, residual)
    if config is None:
        return residual + F.linear(x, weight)
    from attention_backend.kernels.gemm import gemm

    return gemm(x, weight, config, residual=residual)


@added_linear_op.register_fake
def _added_linear_fake(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:  # noqa: ARG001
    return x.new_empty(x.shape[0], weight.shape[0])


def _gemm_config(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> "GemmConfig | None":
    if not x.is_cuda:
        return None
    from attention_backend.kernels.gemm import config_of

    return config_of(x, weight, residual)


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
