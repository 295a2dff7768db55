"""The production runner: a model from models.loader, its pages and kernels, and how its device fails. Knows no
requests.

Importing this takes seconds: torch, transformers, kernels.
"""

import logging

import torch

from attention_backend import dispatch
from models import loader
from models.adapters import LoraLimits
from models.descriptions import max_positions
from models.errors import ModelLoadError
from models.host import HostMemoryError
from models.kv_pool import KVCacheDtypeError, MemoryBudget, PoolTooSmallError
from models.patching import UnsupportedModelError
from models.registry import ModelSource
from models.runner import ModelRunner
from models.stages import Stages
from models.weight_reading import WeightReading
from models.zeroed_memory import ZeroedMemory
from server.engine.config import EngineConfig
from server.engine.runner import CannotServeError, LoadedRunner

logger = logging.getLogger(__name__)


def make(
    config: EngineConfig,
    source: ModelSource,
    device: torch.device,
    reading: WeightReading | None,
    pool_memory: ZeroedMemory | None,
    stages: Stages,
) -> LoadedRunner:
    """Loads weights, or takes those that are being read, and allocates the KV cache, in `pool_memory` as far as that
    reaches. Raises CannotServeError for a model that cannot be served, a pool too small or too large."""
    try:
        return _make(config, source, device, reading, pool_memory, stages)
    except (ModelLoadError, UnsupportedModelError, PoolTooSmallError, KVCacheDtypeError, HostMemoryError) as error:
        raise CannotServeError(str(error)) from error


def _make(
    config: EngineConfig,
    source: ModelSource,
    device: torch.device,
    reading: WeightReading | None,
    pool_memory: ZeroedMemory | None,
    stages: Stages,
) -> LoadedRunner:
    max_model_len = _max_model_len(config, max_positions(source))  # before gigabytes are read for nothing
    model = loader.load(source, dtype=config.dtype, device=device, load_format=config.load_format, reading=reading)
    stages.end("weights")
    step_tokens = config.step_tokens(device.type)
    runner = ModelRunner(
        model,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=step_tokens,
        max_model_len=max_model_len,
        num_blocks=config.num_gpu_blocks_override,
        memory_budget=MemoryBudget(config.gpu_memory_utilization, config.kv_cache_memory_bytes),
        lora=LoraLimits(config.max_loras, config.max_lora_rank) if config.enable_lora else None,
        enforce_eager=config.enforce_eager,
        kv_offload_bytes=int(config.kv_offload_gb * 2**30),
        kv_dtype=config.kv_cache_dtype,
        max_drafts=config.num_speculative_tokens,
        stages=stages,
        pool_memory=pool_memory,
    )
    logger.info("fused layers: %s", runner.fused)
    on_gpu = device.type == "cuda"
    return LoadedRunner(
        runner=runner,
        model=model.name,
        device=torch.cuda.get_device_name(device) if on_gpu else "cpu",
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=max_model_len,
        max_num_batched_tokens=step_tokens,
        tpot_target=config.tpot_target(device.type),
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        sampling_defaults=model.sampling_defaults,
        overlaps=on_gpu,
        out_of_memory=(torch.OutOfMemoryError, MemoryError),
        probe=torch.cuda.synchronize if on_gpu else _host_is_there,
        free_memory=torch.cuda.empty_cache if on_gpu else _host_is_there,
        fill_blocks=runner.fill_blocks,
        prepare=runner.prepare,
        missing_graphs=runner.missing_graphs,
        kernel_calls=dispatch.calls,
        host_memory=runner.host_memory,
        fingerprint=runner.fingerprint,
    )


def _max_model_len(config: EngineConfig, max_position_embeddings: int) -> int:
    """What is served: as asked, but no more than a pool of a given size holds."""
    length = config.max_model_len or max_position_embeddings
    if length > max_position_embeddings:
        raise CannotServeError(f"max_model_len is {length}, but the model has {max_position_embeddings} positions")
    if config.num_gpu_blocks_override is None:
        return length
    room = (config.num_gpu_blocks_override - 1) * config.block_size
    if room < length:
        logger.warning("max_model_len is %d, not %d: the KV cache was given only so many blocks", room, length)
    return min(length, room)


def _host_is_there() -> None:
    """A CPU has no lost devices and caches no memory that a retry could use."""
