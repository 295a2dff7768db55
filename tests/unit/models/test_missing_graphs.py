"""A graph for which there was no memory is tried again later, now and then, and its steps are served meanwhile."""

import logging
from typing import Any

import pytest
import torch

from models import graphs
from models.graphs import FIRST_WAIT, LONGEST_WAIT, StepGraphs
from models.step_shapes import GraphKey, decode_shapes

SHAPES = decode_shapes(8)
FIRST, SECOND, THIRD = (GraphKey(shape) for shape in SHAPES[:3])


class NarrowRecorder:
    """Of a device that is full until somebody gives memory back."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.is_full = True
        self.asked: list[GraphKey] = []

    def record(self, key: GraphKey) -> str:
        self.asked.append(key)
        if self.is_full:
            raise torch.OutOfMemoryError
        return "a graph"


class Made:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(graphs, "GraphRecorder", NarrowRecorder)
        unused: Any = None
        self.now = 100.0
        self.graphs = StepGraphs(
            unused, unused, SHAPES, max_model_len=64, max_levels=0, device=torch.device("cpu"), clock=lambda: self.now
        )
        self.recorder: Any = self.graphs._recorder


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    return Made(monkeypatch)


def test_a_graph_is_tried_again_once_memory_may_have_been_given_back(
    made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "models.graphs")
    assert not made.graphs.record(FIRST)
    made.recorder.is_full = False
    assert made.graphs.num_missing == 1
    made.now += 2 * FIRST_WAIT - 1
    assert not made.graphs.record(FIRST)
    assert made.recorder.asked == [FIRST]
    made.now += 1
    assert made.graphs.record(FIRST)
    assert made.graphs.record(FIRST)
    assert made.recorder.asked == [FIRST, FIRST]
    assert made.graphs.num_missing == 0
    missing, found = caplog.messages
    assert "(time 1, 1 graphs are missing)" in missing
    assert "there is memory again" in found


def test_of_all_that_are_missing_one_is_tried_at_a_time_and_less_and_less_often(made: Made) -> None:
    for key in (FIRST, SECOND):
        assert not made.graphs.record(key)
    waits = []
    for _ in range(12):
        begin, tried = made.now, len(made.recorder.asked)
        while len(made.recorder.asked) == tried:
            made.now += FIRST_WAIT / 2
            for key in (FIRST, SECOND):
                assert not made.graphs.record(key)
        assert len(made.recorder.asked) == tried + 1
        waits.append(made.now - begin)
    assert waits[:4] == [2 * FIRST_WAIT, 4 * FIRST_WAIT, 8 * FIRST_WAIT, 16 * FIRST_WAIT]
    assert waits[-1] == 2 * LONGEST_WAIT


def test_one_that_was_never_tried_waits_for_nobody(made: Made) -> None:
    assert not made.graphs.record(FIRST)
    assert not made.graphs.record(THIRD)
    assert made.recorder.asked == [FIRST, THIRD]


def test_when_one_has_found_memory_the_others_are_tried_at_once(made: Made) -> None:
    for key in (FIRST, SECOND):
        assert not made.graphs.record(key)
    made.now += 2 * FIRST_WAIT
    made.recorder.is_full = False
    assert made.graphs.record(FIRST)
    assert made.graphs.record(SECOND)


def all_are_missing(made: Made) -> None:
    while made.graphs.record_one():
        pass
    assert made.graphs.num_missing == len(SHAPES) == len(made.recorder.asked)
    made.recorder.asked.clear()


def test_a_quiet_moment_is_spent_on_one_that_is_missing_once_it_is_time(made: Made) -> None:
    all_are_missing(made)
    for wait in (FIRST_WAIT, 2 * FIRST_WAIT):
        made.now += wait - 1
        assert not made.graphs.record_one()
        made.now += 1
        assert made.graphs.record_one()
        assert not made.graphs.record_one()
    first, second = made.recorder.asked
    assert first != second


def test_one_of_adapters_that_a_step_missed_is_tried_in_a_quiet_moment_too(made: Made) -> None:
    made.recorder.is_full = False
    while made.graphs.record_one():
        pass
    made.recorder.is_full = True
    adapted = GraphKey(SHAPES[0], adapted=True)
    assert not made.graphs.record(adapted)
    made.recorder.is_full = False
    made.now += FIRST_WAIT
    assert made.graphs.record_one()
    assert made.recorder.asked[-2:] == [adapted, adapted]
    assert made.graphs.num_missing == 0


def test_no_step_waits_for_what_a_quiet_moment_may_try(made: Made) -> None:
    all_are_missing(made)
    for _ in range(20):
        made.now += FIRST_WAIT / 2
        made.graphs.record_one()
    tried = len(made.recorder.asked)
    assert tried > 1
    for shape in SHAPES:
        assert not made.graphs.record(GraphKey(shape))
    assert len(made.recorder.asked) == tried


def test_quiet_moments_fill_all_gaps_once_there_is_memory(made: Made) -> None:
    all_are_missing(made)
    made.recorder.is_full = False
    made.now += FIRST_WAIT
    while made.graphs.record_one():
        pass
    assert made.graphs.num_missing == 0
