"""A tiny model's folder, made once; and its batches, which would all be small enough to be kept, are computed again."""

from pathlib import Path

import pytest
from training_runs import write_model


@pytest.fixture(autouse=True)
def _nothing_is_small_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.training.activations.KEPT_BYTES", 0)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))
