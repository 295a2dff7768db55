"""The newest whole checkpoint is found again, and only by the run that it belongs to."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from models.training import CheckpointError, OtherRunError, StepReport, TrainingPlan
from models.training.checkpoint import Checkpoints, Identity, Progress

IDENTITY = Identity(TrainingPlan("bundled"), "a" * 64, "b" * 64)


def progress(step: int) -> Progress:
    report = StepReport(step, 9, 1.25, 0.5, 1.5, None, 1e-4, 100, 0.5, None)
    return Progress(step, 100 * step, 1, report)


def nothing(folder: Path) -> None:
    """Nothing to serve."""


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    written = Checkpoints(tmp_path / "checkpoints", IDENTITY, keep=2)
    for step in (2, 4, 6):
        written.write(progress(step), {"w": torch.full((3,), float(step)), "n": torch.tensor(step)}, nothing)
    return written


def test_a_new_run_has_none(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "checkpoints", IDENTITY, keep=2).newest() is None


def test_the_newest_comes_back_and_the_oldest_is_gone(checkpoints: Checkpoints) -> None:
    newest = checkpoints.newest()
    assert newest is not None
    found, tensors = newest
    path = checkpoints.path(6)
    assert found == replace(progress(6), report=replace(progress(6).report, checkpoint=path))  # type: ignore[type-var]
    assert tensors["w"].tolist() == [6.0] * 3
    assert tensors["n"].shape == ()
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == ["step-00000004", "step-00000006"]


def test_a_torn_one_is_passed_over_and_removed(checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    weights = checkpoints.path(6) / "training_state.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    newest = checkpoints.newest()
    assert newest is not None
    assert newest[0].step == 4
    assert "step-00000006 is torn" in caplog.text
    assert not checkpoints.path(6).exists()


@pytest.mark.parametrize("name", ["step-00000006/training_state.safetensors", "step-00000006/manifest.json", ""])
def test_one_that_cannot_be_read_now_is_kept_and_no_older_one_taken(checkpoints: Checkpoints, name: str) -> None:
    """As on a network's disk that is away for a moment: going on from step 4, or from none, would lose work."""
    unreadable = checkpoints.folder / name
    aside = unreadable.rename(checkpoints.folder.parent / "aside")
    unreadable.symlink_to(unreadable.name)  # to itself
    with pytest.raises(CheckpointError, match="cannot be read: Too many levels of symbolic links"):
        checkpoints.newest()
    unreadable.unlink()
    aside.rename(unreadable)
    newest = checkpoints.newest()
    assert newest is not None
    assert newest[0].step == 6


def test_when_all_are_torn_the_run_begins_anew(checkpoints: Checkpoints) -> None:
    for step in (4, 6):
        (checkpoints.path(step) / "manifest.json").unlink()
    assert checkpoints.newest() is None


def test_checkpoints_of_another_plan_are_refused(checkpoints: Checkpoints) -> None:
    other = Identity(TrainingPlan("bundled", seed=5), IDENTITY.examples, IDENTITY.validation)
    with pytest.raises(OtherRunError, match=r"another plan \(mine / theirs\): seed 5 / 0"):
        Checkpoints(checkpoints.folder, other, keep=2).newest()


@pytest.mark.parametrize("name", ["examples", "validation"])
def test_checkpoints_of_other_data_are_refused(checkpoints: Checkpoints, name: str) -> None:
    other = replace(IDENTITY, **{name: "c" * 64})
    with pytest.raises(OtherRunError, match=f"other {name}"):
        Checkpoints(checkpoints.folder, other, keep=2).newest()
