"""The kernels of fused layers that are compiled ahead of time, as `covering` wants them."""

from collections.abc import Iterator

import torch

from attention_backend.jit.spec import KernelVariant
from attention_backend.kernels import gated_activation, gated_linear, layer_chain, rms_norm, rotary_store, skinny_linear


def layer_covering_set(arch: str) -> Iterator[KernelVariant]:
    """Every width, head_dim, activation and option of the served dtype, and the other dtype once each."""
    # The served dtype, and the other one: Turing has no bfloat16.
    main, other = (torch.float16,) * 2 if arch == "sm_75" else (torch.bfloat16, torch.float16)
    for kernel in (rms_norm, gated_activation, gated_linear, rotary_store, layer_chain, skinny_linear):
        yield from kernel.covering_set(main, other, arch)
