"""The paged KV cache: how large a block is, how many fit, and the tensors. Knows no requests.

Block 0 is the dummy page: padding and rehearsals read and write it, no request ever owns it.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_backend.metadata import KVPages
from models.attention_sites import AttentionSite
from models.cpu_pool import check_room
from models.zeroed_memory import ZeroedMemory

logger = logging.getLogger(__name__)

_LEAST_HELD = 64 << 20  # bytes worth asking for
_DRAWN = 512  # blocks of a layer that random numbers are drawn for at once: beside a pool there is little memory
FP8 = torch.float8_e4m3fn
#: vLLM's names.
_FP8_NAMES = ("fp8", "fp8_e4m3")

KVCaches = list[KVPages]  # per layer
KVScales = list[tuple[Tensor, Tensor]]  # per layer: of keys and of values, float32 [num_kv_heads]


class PoolTooSmallError(RuntimeError):
    """Not even one request of the model's length fits."""


class KVCacheDtypeError(ValueError):
    """No KV cache of this dtype for this model on this device."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """How much memory the pool may take. `kv_cache_memory_bytes`, when given, is the pool's size on any device."""

    gpu_memory_utilization: float = 0.9  # of the GPU's whole memory: weights, activations and pool together
    kv_cache_memory_bytes: int | None = None


def kv_cache_dtype(name: str, dtype: torch.dtype, sites: Sequence[AttentionSite], device: torch.device) -> torch.dtype:
    """What the pool holds: "auto" is the model's `dtype`, which also has its own name; "fp8" and "fp8_e4m3" are e4m3.

    Raises KVCacheDtypeError for other names, and where float8 pages are not served.
    """
    served = str(dtype).removeprefix("torch.")
    if name in ("auto", served):
        return dtype
    if name not in _FP8_NAMES:
        raise KVCacheDtypeError(
            f"kv_cache_dtype is {name!r}, but with this model it is auto (which is {served}), {served}, "
            f"{' or '.join(_FP8_NAMES)}"
        )
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) < (8, 9):
            raise KVCacheDtypeError(f"kv_cache_dtype is {name!r}, which this GPU has not: it needs sm_89 or later")
        if dtype == torch.float32:
            raise KVCacheDtypeError(
                f"kv_cache_dtype {name!r} goes with bfloat16 and float16 on a GPU, not with {served}"
            )
        odd = [(site.head_dim, site.head_dim_v) for site in sites if site.head_dim % 16 or site.head_dim_v % 16]
        if odd:
            raise KVCacheDtypeError(f"kv_cache_dtype {name!r} needs a head_dim of a multiple of 16, not {odd[0]}")
    return FP8


def bytes_per_block(sites: Sequence[AttentionSite], block_size: int, dtype: torch.dtype) -> int:
    """Keys and values of `block_size` tokens in all layers."""
    per_token = sum(site.num_kv_heads * (site.head_dim + site.head_dim_v) for site in sites)
    return per_token * block_size * dtype.itemsize


def cuda_pool_bytes(budget: MemoryBudget, *, total: int, peak: int) -> int:
    """`peak`: bytes of this GPU in use at the worst moment of a step without the pool, other processes' included."""
    if budget.kv_cache_memory_bytes is not None:
        return budget.kv_cache_memory_bytes
    return max(0, int(total * budget.gpu_memory_utilization) - peak)


def hold(num_bytes: int, device: torch.device) -> None:
    """Of a GPU: from now on this process has so much, in torch's cache until steps want it, or half of that, or less,
    where there is no more. What is merely free goes to whoever asks first, and a trainer beside the engine may ask for
    all of it."""
    if device.type != "cuda":
        return
    held = num_bytes
    while held:
        try:
            torch.empty(held, dtype=torch.uint8, device=device)
            break
        except torch.OutOfMemoryError:
            held = held // 2 if held > _LEAST_HELD else 0
    if held < num_bytes:
        logger.warning(
            "%.2f of %.2f GiB that steps want are not kept for them: others may take them",
            (num_bytes - held) / 2**30, num_bytes / 2**30,
        )  # fmt: skip


@contextmanager
def holding(device: torch.device) -> Iterator[None]:
    """What this process holds in torch's cache it holds afterwards as well, though what is done empties the cache."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.memory_reserved(device)
    torch.cuda.empty_cache()
    given_back = before - torch.cuda.memory_reserved(device)
    yield
    hold(given_back, device)


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
    sites: Sequence[AttentionSite],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    scales: KVScales | None = None,
    memory: ZeroedMemory | None = None,
) -> KVCaches:
    """Pages of zeros. `scales` with float8_e4m3fn: see models.kv_scales. On a CPU they lie in `memory` as far as that
    reaches; raises HostMemoryError for more than there is."""
    if device.type == "cpu":
        check_room(num_blocks * bytes_per_block(sites, block_size, dtype), memory)
    if (scales is not None) != (dtype == FP8):
        raise ValueError(f"scales go with {FP8} pages, and they with them: the pages are {dtype}")
    of_layers: Sequence[tuple[Tensor, Tensor] | tuple[None, None]] = scales or [(None, None)] * len(sites)
    shapes = [
        (num_blocks, site.num_kv_heads, block_size, width)
        for site in sites
        for width in (site.head_dim, site.head_dim_v)
    ]
    tensors = [] if memory is None else memory.take(shapes, dtype)
    tensors += [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes[len(tensors) :]]
    return [
        KVPages(k, v, k_scale, v_scale)
        for k, v, (k_scale, v_scale) in zip(tensors[::2], tensors[1::2], of_layers, strict=True)
    ]


def fill(caches: KVCaches, count: int) -> None:
    """Random numbers in `count` blocks of every layer, the dummy page left out."""
    for pages in caches:
        for tensor in pages:
            for blocks in tensor[1 : 1 + count].split(_DRAWN):
                blocks.copy_(torch.randn(blocks.shape, dtype=torch.bfloat16, device=blocks.device))
