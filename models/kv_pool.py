"""The paged KV cache: how large a block is, how many fit, and the tensors. Knows no requests.

Block 0 is the dummy page: padding and rehearsals read and write it, no request ever owns it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.attention_sites import AttentionSite
from models.host import available_memory_bytes

#: Pool size on a CPU when none is asked for: this much, or this share of the free memory if that is less.
CPU_POOL_BYTES = 4 << 30
CPU_POOL_SHARE = 0.25

KVCaches = list[tuple[Tensor, Tensor]]  # per layer: k [num_blocks, num_kv_heads, block_size, head_dim], v likewise


class PoolTooSmallError(RuntimeError):
    """Not even one request of the model's length fits."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """How much memory the pool may take. `kv_cache_memory_bytes`, when given, is the pool's size on any device."""

    gpu_memory_utilization: float = 0.9  # of the GPU's whole memory: weights, activations and pool together
    kv_cache_memory_bytes: int | None = None


def bytes_per_block(sites: Sequence[AttentionSite], block_size: int, dtype: torch.dtype) -> int:
    """Keys and values of `block_size` tokens in all layers."""
    per_token = sum(site.num_kv_heads * (site.head_dim + site.head_dim_v) for site in sites)
    return per_token * block_size * dtype.itemsize


def cpu_pool_bytes(budget: MemoryBudget) -> int:
    if budget.kv_cache_memory_bytes is not None:
        return budget.kv_cache_memory_bytes
    return min(CPU_POOL_BYTES, int(available_memory_bytes() * CPU_POOL_SHARE))


def cuda_pool_bytes(budget: MemoryBudget, *, total: int, peak: int) -> int:
    """`peak`: bytes of this GPU in use at the worst moment of a step without the pool, other processes' included."""
    if budget.kv_cache_memory_bytes is not None:
        return budget.kv_cache_memory_bytes
    return max(0, int(total * budget.gpu_memory_utilization) - peak)


def count_blocks(pool_bytes: int, block_bytes: int, *, block_size: int, max_num_seqs: int, max_model_len: int) -> int:
    """Blocks to allocate, the dummy page included: what fits, but no more than all sequences at full length can use.

    Raises PoolTooSmallError when one sequence of max_model_len tokens does not fit.
    """
    per_sequence = -(-max_model_len // block_size)
    blocks = min(pool_bytes // block_bytes, max_num_seqs * per_sequence + 1)
    if blocks < per_sequence + 1:
        fits = max(blocks - 1, 0) * block_size
        raise PoolTooSmallError(
            f"the KV cache has room for {fits} tokens ({pool_bytes / 2**30:.2f} GiB), less than max_model_len = "
            f"{max_model_len} ({(per_sequence + 1) * block_bytes / 2**30:.2f} GiB): lower max_model_len or give it "
            "more memory (gpu_memory_utilization, kv_cache_memory_bytes)"
        )
    return blocks


def allocate(
    sites: Sequence[AttentionSite], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> KVCaches:
    return [
        (
            torch.zeros(num_blocks, site.num_kv_heads, block_size, site.head_dim, dtype=dtype, device=device),
            torch.zeros(num_blocks, site.num_kv_heads, block_size, site.head_dim_v, dtype=dtype, device=device),
        )
        for site in sites
    ]
