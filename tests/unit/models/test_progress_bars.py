"""No bar is drawn into a server's log, whoever draws it."""

import pytest
from tqdm.auto import tqdm
from transformers.utils import logging

from models.progress_bars import without_progress_bars


def test_neither_transformers_nor_what_it_calls_draws_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with without_progress_bars():
        assert list(tqdm(range(3))) == [0, 1, 2]
        assert list(logging.tqdm(range(3))) == [0, 1, 2]
    assert capsys.readouterr().err == ""
    list(tqdm(range(3)))
    assert "3/3" in capsys.readouterr().err
