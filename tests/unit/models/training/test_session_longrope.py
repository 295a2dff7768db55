"""Saved weights know the length that chose LongRoPE's factors, and are not loaded where the others act."""

import json
import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor
from training_runs import SIZES, write_model
from transformers import Phi3Config

from models import registry
from models.training import (
    AdamParams,
    CheckpointError,
    Datum,
    LoraSettings,
    SessionSettings,
    TrainingSession,
)

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's own

ORIGINAL = 16
DATUM = Datum(torch.arange(3, 23), torch.arange(4, 24))


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
        "original_max_position_embeddings": ORIGINAL,
    }  # fmt: skip
    config = Phi3Config(**SIZES, original_max_position_embeddings=ORIGINAL, rope_parameters=rope)
    return write_model(tmp_path_factory.mktemp("phi3"), config)


def session_of(folder: Path, max_model_len: int | None) -> TrainingSession:
    settings = SessionSettings(str(folder), max_length=64, micro_batch_tokens=64, max_model_len=max_model_len)
    session = TrainingSession(registry.resolve(str(folder)), settings, "cpu")
    session.create("mine", LoraSettings(rank=2, alpha=4), seed=1)
    return session


def answer(session: TrainingSession) -> Tensor:
    return session.forward("mine", [DATUM], "cross_entropy").logprobs[0]


def saved(folder: Path, place: Path, max_model_len: int | None, *, optimizer: bool = True) -> Tensor:
    """The answer of the model whose weights they are."""
    session = session_of(folder, max_model_len)
    session.forward_backward("mine", [DATUM], "cross_entropy")
    session.optim_step("mine", AdamParams(learning_rate=1e-2))
    session.save("mine", place, optimizer=optimizer, files={})
    return answer(session)


@pytest.mark.parametrize(("before", "now"), [(ORIGINAL, 8), (ORIGINAL + 1, 64), (ORIGINAL + 1, None), (None, 64)])
def test_weights_go_on_at_every_length_with_the_same_factors(
    phi3: Path, tmp_path: Path, before: int | None, now: int | None
) -> None:
    expected = saved(phi3, tmp_path / "weights", before)
    session = session_of(phi3, now)
    assert session.load("mine", tmp_path / "weights", optimizer=True) == 1
    assert torch.equal(answer(session), expected)


@pytest.mark.parametrize("optimizer", [True, False])
@pytest.mark.parametrize(("before", "now"), [(ORIGINAL, ORIGINAL + 1), (None, ORIGINAL)])
def test_weights_of_other_factors_are_refused_and_nothing_is_changed(
    phi3: Path, tmp_path: Path, before: int | None, now: int, optimizer: bool
) -> None:
    saved(phi3, tmp_path / "weights", before, optimizer=optimizer)
    session = session_of(phi3, now)
    first = answer(session)
    with pytest.raises(CheckpointError) as error:
        session.load("mine", tmp_path / "weights", optimizer=optimizer)
    positions = SIZES["max_position_embeddings"]
    assert str(error.value) == (
        f"the weights learnt with LongRoPE's factors of max_model_len {before or positions}; this model has the other "
        f"ones, of max_model_len {now}"
    )
    assert torch.equal(answer(session), first)


def test_where_the_length_chooses_nothing_any_length_goes_on(tiny_folder: Path, tmp_path: Path) -> None:
    expected = saved(tiny_folder, tmp_path / "weights", ORIGINAL)
    session = session_of(tiny_folder, None)
    session.load("mine", tmp_path / "weights", optimizer=True)
    assert torch.equal(answer(session), expected)


def test_weights_that_do_not_say_are_loaded_with_a_warning(
    phi3: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that an earlier version saved."""
    expected = saved(phi3, tmp_path / "weights", None)
    manifest = json.loads((tmp_path / "weights" / "manifest.json").read_text())
    del manifest["files"]["training.json"]
    (tmp_path / "weights" / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "weights" / "training.json").unlink()
    session = session_of(phi3, None)
    with caplog.at_level(logging.WARNING):
        session.load("mine", tmp_path / "weights", optimizer=True)
    assert "do not say for which max_model_len" in caplog.text
    assert torch.equal(answer(session), expected)
