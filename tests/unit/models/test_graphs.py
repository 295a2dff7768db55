"""Which graphs there are, which one a step runs in, and in which order they are recorded: with a recorder that notes
what it is asked for, as on a CPU nothing can be recorded."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from models import graphs
from models.batch import ScheduledSeq, StepBatch
from models.graphs import StepGraphs
from models.shared_runs import Levels, SharedRun, StepSharing
from models.step_rows import StepRows
from models.step_shapes import GraphKey, chunk_shapes, decode_shapes, draft_shapes

ONE: Levels = ((SharedRun(0, 5, 0, 3),),)
TWO: Levels = ((SharedRun(0, 5, 0, 3),), (SharedRun(0, 2, 3, 8),))
THREE: Levels = (*TWO, (SharedRun(0, 2, 8, 9),))


class NotingRecorder:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.asked: list[GraphKey] = []

    def record(self, key: GraphKey) -> GraphKey:
        self.asked.append(key)
        return key


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> StepGraphs:
    monkeypatch.setattr(graphs, "GraphRecorder", NotingRecorder)
    unused: Any = None
    shapes = [*decode_shapes(12), *draft_shapes(12, 3), *chunk_shapes(12, 256)]
    return StepGraphs(unused, unused, shapes, max_model_len=64, max_levels=2, device=torch.device("cpu"))


def batch(decodes: int, levels: Levels, *, chunk: int = 0) -> StepBatch:
    seqs = [ScheduledSeq(slot, [3], 200, [1], True) for slot in range(decodes)]
    seqs += [ScheduledSeq(decodes, [3] * chunk, 0, [1], True)] if chunk else []
    return StepBatch(tuple(seqs), StepSharing(levels))


def key_of(made: StepGraphs, step: StepBatch) -> GraphKey | None:
    return made.key_of(step, StepRows.of(step))


def test_a_step_runs_in_a_graph_of_as_many_levels_as_it_shares(made: StepGraphs) -> None:
    found = [key_of(made, batch(5, levels)) for levels in ((), ONE, TWO, THREE)]
    assert [key and (key.levels, key.shape.rows) for key in found] == [(0, 6), (1, 6), (2, 8), None]
    beside = [key_of(made, batch(5, levels, chunk=60)) for levels in ((), ONE, TWO, THREE)]
    assert [key and (key.levels, key.shape.rows, key.shape.decodes) for key in beside] == [
        (0, 128, 12), (1, 128, 12), (2, 128, 12), None
    ]  # fmt: skip
    assert all(key in made._keys for key in [*found[:3], *beside[:3]])


def test_quiet_moments_record_each_graph_once_and_those_of_several_levels_last(made: StepGraphs) -> None:
    while made.record_one():
        pass
    recorder: Any = made._recorder
    asked: list[GraphKey] = recorder.asked
    assert sorted(asked) == made._keys
    largest = len(made.largest())
    assert {key.levels for key in asked[:largest]} == {0, 2}  # what is recorded after these finds its memory
    levels = [key.levels for key in asked[largest:]]
    assert levels[levels.index(2) :] == [2] * levels.count(2)


def test_memory_is_held_around_every_recording_and_once_around_all_of_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "GraphRecorder", NotingRecorder)
    unused: Any = None
    told: list[int] = []  # recordings so far, when the block begins and ends

    @contextmanager
    def around() -> Iterator[None]:
        recorder: Any = made._recorder
        told.append(len(recorder.asked))
        yield
        told.append(len(recorder.asked))

    made = StepGraphs(
        unused, unused, decode_shapes(4), max_model_len=64, max_levels=0, device=torch.device("cpu"),
        around_recordings=around,
    )  # fmt: skip
    assert made.record_one()
    assert made.record(made._keys[0])
    assert made.record(made._keys[0])
    made.capture()
    assert told == [0, 1, 1, 2, 2, len(made._keys)]


def test_the_largest_graphs_bound_the_others(made: StepGraphs) -> None:
    """What `_graph_bytes` measures: of every kind the most rows, and the most levels."""
    largest = made.largest()
    for key in made._keys:
        alike = [
            one for one in largest
            if (one.shape.only_decodes, one.shape.few_rows, one.levels > 0)
            == (key.shape.only_decodes, key.shape.few_rows, key.levels > 0)
        ]  # fmt: skip
        assert len(alike) == 1
        assert alike[0].shape.rows >= key.shape.rows
        assert alike[0].levels >= key.levels


def test_without_sharing_no_step_finds_a_graph_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "GraphRecorder", NotingRecorder)
    unused: Any = None
    made = StepGraphs(unused, unused, decode_shapes(12), max_model_len=64, max_levels=0, device=torch.device("cpu"))
    assert made._keys == [GraphKey(shape) for shape in decode_shapes(12)]
    assert key_of(made, batch(5, ONE)) is None
