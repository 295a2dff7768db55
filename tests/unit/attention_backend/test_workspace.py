"""Counters of kernels: what may run at the same time never shares them, and a graph's are never given away."""

import weakref
from itertools import pairwise

import pytest
import torch

from attention_backend.kernels.workspace import Reserve, Workspace

CPU = torch.device("cpu")
STREAM, OTHER = 0x70, 0x80


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


def test_a_stream_keeps_its_counters_and_gets_more_when_it_needs_them() -> None:
    workspace = Workspace()
    first = workspace.counters(CPU, STREAM, 8, None)
    assert workspace.counters(CPU, STREAM, first.numel(), None).data_ptr() == first.data_ptr()
    more = workspace.counters(CPU, STREAM, first.numel() + 1, None)
    assert more.numel() > first.numel()
    assert not more.any()


def test_streams_and_captures_have_counters_of_their_own() -> None:
    workspace = Workspace()
    handed_out = [
        workspace.counters(CPU, STREAM, 500, None),
        workspace.counters(CPU, OTHER, 500, None),
        workspace.counters(CPU, STREAM, 500, 1),
        workspace.counters(CPU, OTHER, 500, 1),
        workspace.counters(CPU, STREAM, 500, 2),
    ]
    for i, a in enumerate(handed_out):
        assert a.numel() >= 500
        assert a.dtype == torch.int32
        assert not any(overlap(a, b) for b in handed_out[:i])


def test_launches_of_a_capture_share_counters_until_one_needs_more() -> None:
    workspace = Workspace()
    workspace.counters(CPU, STREAM, 1, None)
    first = workspace.counters(CPU, STREAM, 500, 7)
    assert workspace.counters(CPU, STREAM, 100, 7).data_ptr() == first.data_ptr()
    assert not overlap(workspace.counters(CPU, STREAM, 5000, 7), first)


def test_counters_of_a_capture_are_never_handed_out_again() -> None:
    """Its graph may be replayed for as long as the process runs, and holds no tensor."""
    workspace = Workspace()
    captured: list[int] = []
    memory: list[weakref.ref[torch.Tensor]] = []
    for round_ in range(4):
        workspace.counters(CPU, STREAM, 1, None)
        captures = range(100 * round_, 100 * round_ + 100)
        captured += [workspace.counters(CPU, STREAM, 1000, capture).data_ptr() for capture in captures]
        whole = workspace.counters(CPU, STREAM, 1000, captures[-1])._base
        assert whole is not None
        memory.append(weakref.ref(whole))
        del whole
    assert all(ref() is not None for ref in memory)
    addresses = sorted(captured)
    assert all(b - a >= 4000 for a, b in pairwise(addresses))


def test_a_capture_without_a_reserve_gets_counters_that_are_kept_until_it_is_over() -> None:
    workspace = Workspace()
    inside = workspace.counters(CPU, STREAM, 10, 1)
    assert not inside.any()
    assert workspace.counters(CPU, STREAM, 10, 1).data_ptr() == inside.data_ptr()
    workspace.counters(CPU, STREAM, 10, None)
    assert workspace.counters(CPU, STREAM, 10, 2).data_ptr() != inside.data_ptr()


@pytest.mark.parametrize("count", [1, 255, 256, 257, 1000])
def test_a_reserve_hands_out_each_counter_once(count: int) -> None:
    reserve = Reserve(torch.zeros(2048, dtype=torch.int32))
    taken = []
    while (part := reserve.take(count)) is not None:
        assert part.numel() >= count
        part += 1
        taken.append(part)
    assert taken
    assert all(bool((part == 1).all()) for part in taken)
    assert reserve.left < count + 256
