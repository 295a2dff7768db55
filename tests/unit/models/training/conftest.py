"""A tiny model's folder, made once."""

from pathlib import Path

import pytest
from training_runs import write_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))
