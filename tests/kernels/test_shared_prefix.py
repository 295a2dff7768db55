"""Requests over shared pages: one pass over the prefix, one over each suffix, merged, against plain attention."""

import pytest
import torch

from attention_backend import cascade, dispatch

from . import first_calls
from .prefix_problems import (
    Level,
    PrefixCase,
    PrefixProblem,
    assert_meets_the_rule,
    build,
    check,
    one_prefix,
    shared_prefix_attention,
)
from .test_graphs import captured

BF16, FP16 = torch.bfloat16, torch.float16
SUFFIXES = (600, 1, 0, 64, 65, 333)


def suffixes(count: int) -> tuple[int, ...]:
    return tuple(SUFFIXES[r % len(SUFFIXES)] for r in range(count))


@pytest.fixture(scope="module", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    first_calls.run_all(request, PrefixCase, lambda case: build(case, torch.device("cuda", 0)).attend())


REQUESTS = [one_prefix(1000, suffixes(requests), rows=rows) for requests in (1, 4, 17, 64) for rows in (1, 3, 16)]
LENGTHS = [one_prefix(length, suffixes(40)) for length in (0, 1, 63, 64, 65, 127, 129, 4099, 20_000)]
SHAPES = [
    one_prefix(1500, suffixes(33), dim=dim, page=page, dtype=dtype, hnd=page != 64)
    for dim, page, dtype in (
        (64, 64, BF16), (80, 64, BF16), (96, 64, BF16), (192, 64, BF16), (256, 64, BF16), (64, 16, FP16),
        (128, 16, BF16), (128, 48, FP16), (128, 128, BF16), (256, 16, FP16), (40, 4, FP16),
    )
]  # fmt: skip
HEADS = [
    one_prefix(3000, suffixes(requests), heads=heads, kv_heads=kv_heads)
    for requests in (3, 50)
    for heads, kv_heads in ((4, 4), (32, 8), (32, 2), (10, 2), (16, 1))
]
OPTIONS = [
    one_prefix(2000, suffixes(requests), sinks=sinks, softcap=softcap, rows=rows)
    for requests in (3, 50)
    for sinks, softcap, rows in ((True, 0.0, 1), (False, 15.0, 1), (True, 0.0, 5))
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*REQUESTS, *LENGTHS, *SHAPES, *HEADS, *OPTIONS], ids=str)
def test_one_prefix_meets_the_error_rule(case: PrefixCase, device: torch.device) -> None:
    check(build(case, device))


GROUPS = {
    "several": (Level((20, 1, 30, 13), (3000, 65, 0, 1111)),),
    "nested": (Level((64,), (700,)), Level((40, 23, 1), (2049, 0, 300))),
    "three_levels": (Level((64,), (64,)), Level((32, 32), (500, 1500)), Level((32, 16, 16), (100, 0, 3000))),
    "all_empty": (Level((10, 54), (0, 0)),),
    "none": (),
}


GROUPED = [PrefixCase(suffixes(64), levels, rows=rows) for levels in GROUPS.values() for rows in (1, 4)]


@pytest.mark.gpu
@pytest.mark.parametrize("case", GROUPED, ids=str)
def test_groups_and_groups_within_groups_meet_the_error_rule(case: PrefixCase, device: torch.device) -> None:
    check(build(case, device))


@pytest.mark.gpu
@pytest.mark.parametrize("levels", GROUPS)
def test_whichever_kernel_serves_the_prefix_meets_the_error_rule(
    levels: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without partial results, as on GPUs before and after Hopper: the passes' results merge as single states."""
    monkeypatch.setattr(cascade, "_HOPPER", "")
    check(build(PrefixCase(suffixes(64), GROUPS[levels], rows=2, sinks=True), device))


@pytest.mark.gpu
def test_rows_that_see_nothing_are_zero(device: torch.device) -> None:
    problem = build(one_prefix(0, (0,) * 40, sinks=True), device)
    wide = torch.zeros((40, 2), dtype=torch.int32, device=device)
    out, lse = shared_prefix_attention(
        problem.q, problem.k, problem.v, prefix_block_table=wide[0], prefix_len=0, suffix_block_table=wide,
        suffix_lens=problem.suffix_lens, return_lse=True, **problem.options,
    )  # fmt: skip
    assert not out.any()
    assert bool((lse == -torch.inf).all())


@pytest.mark.gpu
def test_many_requests_over_a_long_prefix_go_over_it_together(cuda: torch.device) -> None:
    """On Hopper by its tensor-core forward, split over the keys; and right."""
    problem = build(one_prefix(70_000, (600,) * 64, heads=16, kv_heads=4), cuda)
    check(problem)
    before = dispatch.calls().get("flash_decode", 0)
    problem.attend()
    hopper = torch.cuda.get_device_capability(cuda) == (9, 0)
    assert dispatch.calls()["flash_decode"] == before + 1 or not hopper  # the suffixes only


def set_lengths(problem: PrefixProblem, prefix: int, own: list[int]) -> None:
    problem.prefixes[0].lens.fill_(prefix)
    problem.suffix_lens.copy_(torch.tensor(own))


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [4, 40])
def test_a_graph_follows_lengths_that_change_between_replays(requests: int, cuda: torch.device) -> None:
    """Shorter lengths over the same pages leave real keys behind the end, which must not be seen either."""
    problem = build(one_prefix(5000, (600,) * requests), cuda)
    results: list[torch.Tensor] = []

    def work() -> torch.Tensor:
        out, lse = problem.attend()
        results[:] = [lse]
        return out

    graph, out = captured(work)
    lse = results[0]
    lengths = [(5000, [600] * requests), (64, [1] * requests), (0, [r % 7 for r in range(requests)])]
    for prefix, own in (*lengths, (4097, [r * 13 % 600 for r in range(requests)])):
        set_lengths(problem, prefix, own)
        problem.q.copy_(torch.randn_like(problem.q))
        graph.replay()
        plain_out, plain_lse = problem.attend()
        assert torch.equal(out, plain_out), f"replay with a prefix of {prefix} differs from a plain call"
        assert torch.equal(lse, plain_lse)
        assert_meets_the_rule(problem, out, lse)


@pytest.mark.gpu
@pytest.mark.parametrize("levels", ["several", "nested"])
def test_a_thousand_repeats_are_bitwise_equal(levels: str, device: torch.device) -> None:
    problem = build(PrefixCase(suffixes(64), GROUPS[levels]), device)
    want, want_lse = problem.attend()
    differing = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(1000 if device.type == "cuda" else 2):
        out, lse = problem.attend()
        differing += (out != want).any() | (lse != want_lse).any()
    assert int(differing) == 0


SMALL = {
    "several": (Level((3, 1, 2), (40, 0, 17)),),
    "nested": (Level((6,), (9,)), Level((2, 3, 1), (33, 0, 16))),
    "none": (),
}


@pytest.mark.parametrize("levels", SMALL)
def test_small_groups_meet_the_error_rule_on_cpu(levels: str) -> None:
    case = PrefixCase((20, 1, 0, 16, 2, 7), SMALL[levels], rows=2, dim=32, page=16, sinks=True)
    check(build(case, torch.device("cpu")))
