"""How much memory the KV cache takes on a CPU, and the part of it that can be taken before the model is there. Knows no
pages; imports no transformers."""

from pathlib import Path

from models.host import HostMemoryError, available_memory_bytes
from models.zeroed_memory import ZeroedMemory

#: When no size is asked for: this much, or this share of the free memory if that is less.
POOL_BYTES = 4 << 30
POOL_SHARE = 0.25
#: No model takes more memory, while it loads, than so many times its files: float8 weights that become float32.
WEIGHTS_IN_MEMORY = 4


def cpu_pool_bytes(asked: int | None, memory: ZeroedMemory | None = None) -> int:
    """`asked`: kv_cache_memory_bytes. `memory`: the pool's already, and so not free."""
    return asked if asked is not None else min(POOL_BYTES, int(_free(memory) * POOL_SHARE))


def begin_pool(folder: Path, asked: int | None) -> ZeroedMemory | None:
    """Memory for a pool, to be touched while the rest is imported and the weights of `folder` are loaded: as much as
    there will be beside them. None: too little to begin with. Raises HostMemoryError."""
    weights = WEIGHTS_IN_MEMORY * sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    free = available_memory_bytes() - weights
    size = asked if asked is not None else min(POOL_BYTES, int(free * POOL_SHARE))
    return ZeroedMemory(size) if 0 < size <= free else None


def check_room(num_bytes: int, memory: ZeroedMemory | None = None) -> None:
    """Raises HostMemoryError where a pool of so many bytes is more than there is: the kernel would give it, and end
    the process when it is written. `memory` as above."""
    free = _free(memory)
    if num_bytes > free:
        raise HostMemoryError(
            f"the KV cache would take {num_bytes / 2**30:.2f} GiB of memory, and {free / 2**30:.2f} GiB are free: give "
            "it less (kv_cache_memory_bytes, num_gpu_blocks_override)"
        )


def _free(memory: ZeroedMemory | None) -> int:
    return available_memory_bytes() + (0 if memory is None else memory.touched)
