"""What the launchers ask of a device, asked once. Knows no kernel."""

from functools import cache

import torch

from attention_backend.jit.spec import arch_for


@cache
def capability(index: int) -> tuple[int, int]:
    """The compute capability: (9, 0) is a Hopper."""
    return torch.cuda.get_device_capability(index)


@cache
def arch(index: int) -> str:
    """The architecture that kernels for this GPU are compiled for. Raises UnsupportedArchError."""
    return arch_for(capability(index))


@cache
def l2_bytes(index: int) -> int:
    return torch.cuda.get_device_properties(index).L2_cache_size


@cache
def num_sms(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
