"""The layout that kernels ask of their inputs: any strides, but the last dimension in one piece. Knows no model."""

from torch import Tensor


def tokens_first(states: Tensor) -> Tensor:
    """`[batch, heads, tokens, dim]` as transformers has it -> `[batch, tokens, heads, dim]`, a view.

    The exception is a last dimension with gaps (Inkling, after its convolutions), which is copied.
    """
    if states.stride(-1) != 1:
        states = states.contiguous()
    return states.transpose(1, 2)
