"""The bundled model and a tiny random one, each made once."""

import pytest
from tiny_models import as_loaded, random_model, tiny_config

from models import registry
from models.loader import LoadedModel, load
from models.runner import ModelRunner


@pytest.fixture(scope="session")
def bundled_source() -> registry.ModelSource:
    """Converted on first use, in the user's cache."""
    return registry.resolve("bundled")


@pytest.fixture(scope="session")
def bundled_model(bundled_source: registry.ModelSource) -> LoadedModel:
    return load(bundled_source, dtype="float32")


@pytest.fixture(scope="session")
def tiny_runner() -> ModelRunner:
    loaded = as_loaded(random_model(tiny_config()))
    return ModelRunner(
        loaded, block_size=16, max_num_seqs=16, max_num_batched_tokens=64, max_model_len=256, num_blocks=128
    )
