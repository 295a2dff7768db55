"""Decode in CUDA graphs and on several streams at once: the counters of the merge are never shared nor left behind."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_backend.problem import AttentionArgs

from .error_rule import check
from .test_decode import decode

KERNELS = pytest.mark.parametrize("tma", [True, False], ids=["tma", "generic"])
LENGTHS = ([8000, 8000, 8000], [0, 0, 0], [1, 8000, 0], [64, 63, 65], [129, 4096, 8000], [8000, 0, 0], [5, 6, 7])


def attend(args: AttentionArgs, tma: bool) -> tuple[Tensor, Tensor]:
    from attention_backend.kernels import flash_decode

    return flash_decode.forward(args, tma=tma)


def with_lengths(args: AttentionArgs, lens: list[int]) -> AttentionArgs:
    """The same problem whose lengths lie elsewhere."""
    assert args.seqused_k is not None
    return replace(args, seqused_k=torch.tensor(lens, dtype=torch.int32, device=args.q.device))


def captured(args: AttentionArgs, tma: bool, calls: int = 1) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor]]:
    attend(args, tma)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            results = attend(args, tma)
    return graph, results


def same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.gpu
@KERNELS
@pytest.mark.parametrize("splits", [0, 1, 5, 200])
@pytest.mark.parametrize("rows", [1, 9])
def test_replays_follow_lengths_with_plain_calls_between(rows: int, splits: int, tma: bool, cuda: torch.device) -> None:
    """9 rows of 8 heads are more than one block takes: several counters a pair."""
    args = decode([8000] * 3, device=cuda, kv_heads=4, group=4 if rows == 1 else 5, rows=rows, splits=splits)
    assert args.seqused_k is not None
    graph, results = captured(args, tma)
    for lens in (*LENGTHS, *reversed(LENGTHS)):
        args.seqused_k.copy_(torch.tensor(lens))
        want = attend(with_lengths(args, lens), tma)
        graph.replay()
        assert same(results, want), f"replay with lengths {lens}"
        assert same(attend(args, tma), want), f"plain call after a replay with lengths {lens}"
        results[0].fill_(torch.nan)
        graph.replay()
        assert same(results, want), f"second replay with lengths {lens}"
    args.seqused_k.fill_(8000)
    graph.replay()
    check(args, results)


@pytest.mark.gpu
@KERNELS
def test_two_graphs_captured_on_one_stream_replay_in_any_order(tma: bool, cuda: torch.device) -> None:
    problems = [decode([n, 100, n // 3], device=cuda, kv_heads=8) for n in (5000, 8000)]
    want = [attend(args, tma) for args in problems]
    graphs = [captured(args, tma, calls=3) for args in problems]
    for which in (0, 1, 0, 0, 1, 1, 0, 1):
        graph, results = graphs[which]
        results[0].fill_(torch.nan)
        graph.replay()
        assert same(results, want[which])
    del graphs[0]
    extra = torch.full((1 << 20,), -1, dtype=torch.int32, device=cuda)  # takes memory that the graph gave back
    graphs[0][0].replay()
    assert same(graphs[0][1], want[1])
    del extra


@pytest.mark.gpu
@KERNELS
def test_streams_and_graphs_at_once_do_not_meet(tma: bool, cuda: torch.device) -> None:
    """A graph on one stream, another on a second, plain calls on a third: each as if it were alone."""
    problems = [decode([n, 3000], device=cuda, kv_heads=8) for n in (4000, 6000, 8000)]
    want = [attend(args, tma) for args in problems]
    first, second = captured(problems[0], tma, calls=20), captured(problems[1], tma, calls=20)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    plain = []
    for _ in range(10):
        for stream, (graph, _) in zip(streams, (first, second), strict=False):
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(streams[2]):
            plain += [attend(problems[2], tma) for _ in range(20)]
    torch.cuda.synchronize()
    assert same(first[1], want[0])
    assert same(second[1], want[1])
    assert all(same(results, want[2]) for results in plain)


@pytest.mark.gpu
@KERNELS
def test_branches_of_one_graph_do_not_meet(tma: bool, cuda: torch.device) -> None:
    problems = [decode([n, 3000], device=cuda, kv_heads=8) for n in (6000, 8000)]
    want = [attend(args, tma) for args in problems]
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        for _ in range(10):
            here = attend(problems[0], tma)
            with torch.cuda.stream(side):
                there = attend(problems[1], tma)
        main.wait_stream(side)
    for _ in range(10):
        graph.replay()
    torch.cuda.synchronize()
    assert same(here, want[0])
    assert same(there, want[1])


@pytest.mark.gpu
@KERNELS
@pytest.mark.parametrize(
    ("lens", "options"),
    [
        ([131_072], {"kv_heads": 8}),
        ([1024], {"kv_heads": 8}),
        ([4000, 1, 0, 777, 8000], {"group": 9, "rows": 2}),
        ([1000 + b for b in range(40)], {"kv_heads": 4, "dim": 64}),
    ],
    ids=["long", "short", "rows", "batch"],
)
def test_a_thousand_repeats_are_bitwise_equal(
    lens: list[int], options: dict[str, Any], tma: bool, cuda: torch.device
) -> None:
    args = decode(lens, device=cuda, **options)
    want = attend(args, tma)
    graph, results = captured(args, tma, calls=1)
    differing = torch.zeros((), dtype=torch.int64, device=cuda)
    for _ in range(1000):
        results[0].fill_(torch.nan)
        graph.replay()
        differing += (results[0] != want[0]).any() | (results[1] != want[1]).any()
    assert int(differing) == 0


@pytest.mark.gpu
@KERNELS
def test_counters_are_zero_afterwards(tma: bool, cuda: torch.device) -> None:
    from attention_backend.kernels import workspace

    for lens in ([5000, 1], [0, 0], [8000, 8000]):
        attend(decode(lens, device=cuda, kv_heads=8, rows=9), tma)
        assert not workspace.counters(cuda, 16).any()
