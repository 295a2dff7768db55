"""The way from a folder to pages on a CPU, with the real loader and runner."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from models.runner import ModelRunner
from models.stages import Stages
from models.zeroed_memory import ZeroedMemory
from server.engine import loading
from server.engine.config import EngineConfig
from server.engine.runner import CannotServeError

sys.path.append(str(Path(__file__).parents[2] / "models"))  # tiny models are made as their own tests make them
from tiny_models import random_model, tiny_config

POOL = 8 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    random_model(tiny_config()).save_pretrained(path)
    return path


def config(folder: Path, **fields: Any) -> EngineConfig:
    return EngineConfig(model=str(folder), device="cpu", max_model_len=64, **fields)


def test_pages_lie_in_memory_that_was_touched_before_there_was_a_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[ZeroedMemory | None] = []
    begin = loading.begin_pool
    monkeypatch.setattr(loading, "begin_pool", lambda *arguments: begun.append(begin(*arguments)) or begun[-1])
    runner = loading.load(config(folder, kv_cache_memory_bytes=POOL, max_num_seqs=2), Stages()).runner
    assert isinstance(runner, ModelRunner)
    (memory,) = begun
    assert memory is not None
    first = torch.frombuffer(memory._memory, dtype=torch.uint8).data_ptr()
    tensors = [tensor for layer in runner._kv_caches for tensor in layer]
    assert [first <= tensor.data_ptr() < first + POOL for tensor in tensors] == [True] * 6
    assert not any(tensor.any() for tensor in tensors)


def test_a_pool_that_is_more_than_the_host_has_is_refused_in_words(folder: Path) -> None:
    with pytest.raises(CannotServeError, match=r"KV cache would take .* GiB are free: give it less \(kv_cache_memory"):
        loading.load(config(folder, num_gpu_blocks_override=10**10), Stages())


def test_a_context_that_the_model_has_not_is_refused_before_its_weights_are_looked_for(tmp_path: Path) -> None:
    tiny_config().save_pretrained(tmp_path)
    wanted = EngineConfig(model=str(tmp_path), device="cpu", max_model_len=513)
    with pytest.raises(CannotServeError, match="max_model_len is 513, but the model has 512 positions"):
        loading.load(wanted, Stages())
