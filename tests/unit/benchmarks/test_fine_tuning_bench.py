"""The walk-through's files are what the server takes, and its plot is drawn from results alone."""

import json
from pathlib import Path

import pytest

from benchmarks import fine_tuning
from benchmarks.record import RESULTS
from server.files.examples import Form
from server.files.jsonl import TrainingFileCheck


@pytest.mark.parametrize("questions", [fine_tuning.TRAINING, fine_tuning.VALIDATION])
def test_its_files_are_training_files(questions: tuple[str, ...]) -> None:
    check = TrainingFileCheck()
    check.feed(fine_tuning.jsonl(questions))
    check.finish()
    assert (check.form, check.examples) == (Form.CHAT, len(questions))


def test_no_validation_question_is_trained_on() -> None:
    assert not set(fine_tuning.VALIDATION) & set(fine_tuning.TRAINING)


def test_the_plot_is_drawn_from_the_recorded_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    fine_tuning.draw(json.loads((RESULTS / "fine_tuning_cpu.json").read_text()), tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
