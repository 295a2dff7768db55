"""The way to the production runner: what takes long begins first. Reading weights to a GPU, and touching the memory of
a CPU's KV cache, needs only torch, so it goes on while everything else is imported. Knows no requests."""

import gc
from dataclasses import replace
from pathlib import Path

import torch

from models import registry
from models.cpu_pool import begin_pool
from models.errors import ModelLoadError
from models.host import HostMemoryError
from models.registry import ModelSource
from models.stages import Stages
from models.stored_weights import readable
from models.towers import fetch_text_model
from models.unused_packages import leave_out
from models.weight_reading import WeightReading
from models.zeroed_memory import ZeroedMemory
from server.engine.config import EngineConfig
from server.engine.runner import CannotServeError, LoadedRunner


def load(config: EngineConfig, stages: Stages) -> LoadedRunner:
    """Loads weights and allocates the KV cache. Raises CannotServeError with what the person who started the server
    must know: no such model, one that cannot be served, a pool too small or too large."""
    device = _device(config.device)
    try:
        source = registry.resolve(
            config.model, cache_dir=_path(config.cache_dir), image_dir=_path(config.model_image_dir)
        )
        source, reading = _begin_reading(config, source, device)
        source, pool_memory = _begin_pool(config, source, device)
    except (ModelLoadError, HostMemoryError, NotImplementedError) as error:
        # UnsupportedModelError is a NotImplementedError, of a room that would bring transformers along.
        raise CannotServeError(str(error)) from error
    leave_out(source.folder)
    from server.engine.production import make

    gc.freeze()  # modules stay: no collection needs to look at them
    stages.end("imports")
    return make(config, source, device, reading, pool_memory, stages)


def _begin_reading(
    config: EngineConfig, source: ModelSource, device: torch.device
) -> tuple[ModelSource, WeightReading | None]:
    """On a GPU, of weights that need nothing but reading; the source's files are here then. Raises ModelLoadError."""
    if device.type != "cuda" or config.load_format != "auto":
        return source, None
    source = _fetched(source)
    tensors = readable(source.fetch())
    return source, None if tensors is None else WeightReading(tensors, device)


def _begin_pool(
    config: EngineConfig, source: ModelSource, device: torch.device
) -> tuple[ModelSource, ZeroedMemory | None]:
    """On a CPU, beside weights whose size is known; the source's files are here then. Raises ModelLoadError,
    HostMemoryError."""
    if device.type != "cpu" or config.load_format != "auto" or config.num_gpu_blocks_override is not None:
        return source, None
    source = _fetched(source)
    return source, begin_pool(source.fetch(), config.kv_cache_memory_bytes)


def _fetched(source: ModelSource) -> ModelSource:
    """Raises ModelLoadError, and UnsupportedModelError before the weights of a model with towers are downloaded."""
    return replace(source, folder=fetch_text_model(source), hub_id=None, bundled=False)


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _device(name: str) -> torch.device:
    """An explicit "cuda" without a GPU is an error, never a CPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise CannotServeError("device is 'cuda', but torch finds no usable GPU (see `longwave doctor`)")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name, 0) if name == "cuda" else torch.device(name)
