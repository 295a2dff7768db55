"""The attention benchmark's inputs, truth, contenders and clock on the CPU, with small cells."""

import gc
import math
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from unittest.mock import Mock

import pytest
import torch

from benchmarks import attention_timing
from benchmarks.attention_cells import Cell
from benchmarks.attention_contenders import REGISTRY, Contender, chosen
from benchmarks.attention_grid import select
from benchmarks.attention_inputs import Tensors, block_pattern
from benchmarks.attention_masks import ALIBI, DOCUMENTS, GLOBAL_WINDOW, PREFIX_LM, SINKS, SOFTCAP, WINDOW
from benchmarks.attention_registry import FLEX, OURS, found
from benchmarks.attention_report import Result
from benchmarks.attention_torch import key_padding_mask
from benchmarks.attention_truth import Truth, acceptable, sampled_rows, visible
from benchmarks.stopwatch import Call, Stopwatch, alternate, alternate_all, repeats, turns

CPU = torch.device("cpu")
FORWARD = Cell("forward", 2, 24, 24, 4, 2, 16, True)
DECODE = Cell("decode", 3, 1, 128, 4, 2, 16, False, page=64)
CHUNK = Cell("paged", 1, 40, 128, 4, 2, 16, True, page=64)
VARLEN = Cell("varlen", 3, 150, 150, 4, 4, 16, True, lengths=(70, 150, 20))
PADDING = Cell("padding", 3, 40, 40, 4, 4, 16, False, lengths=(40, 7, 25))
SHARED = Cell("shared_prefix", 4, 1, 150, 4, 2, 16, False, page=16, shared=96)
SPARSE = Cell("block_sparse", 1, 512, 512, 2, 2, 16, False, density=0.5)
DROPOUT = Cell("dropout", 2, 256, 256, 4, 4, 16, True, dropout=0.1)
SHAPES = Cell("shapes", 1, 64, 64, 2, 2, 80, True, dtype="float16")
FEATURES = [
    Cell("features", 1, 512, 512, 4, 2, 64, True, option=option, amount=amount)
    for option, amount in ((WINDOW, 200), (SOFTCAP, 50), (SINKS, 0), (ALIBI, 0))
]
PATTERNS = [
    Cell("patterns", 1, 512, 512, 2, 2, 64, option != PREFIX_LM, option=option, amount=amount)
    for option, amount in ((GLOBAL_WINDOW, 150), (PREFIX_LM, 200), (DOCUMENTS, 4))
]
FLOAT8_FORWARD = Cell("fp8_forward", 1, 200, 200, 2, 2, 64, True)
FLOAT8 = Cell("fp8_kv", 2, 1, 128, 4, 2, 16, False, page=64)
CELLS = [
    FORWARD,
    replace(FORWARD, section="backward"),
    replace(FORWARD, section="backward", causal=False),
    DECODE,
    replace(DECODE, section="latency", calls=3),
    CHUNK,
    replace(CHUNK, section="chunk"),
    VARLEN,
    replace(VARLEN, causal=False),
    PADDING,
    replace(PADDING, causal=True),
    SHARED,
    SPARSE,
    DROPOUT,
    FLOAT8,
    SHAPES,
    *FEATURES,
    replace(DROPOUT, section="features"),
    *PATTERNS,
    FLOAT8_FORWARD,
    replace(FLOAT8_FORWARD, section="fp8_error", causal=False),
]
CUDA_ONLY = ("longwave-generic", "longwave-kernel")


def ours_of(cells: Sequence[Cell]) -> list[tuple[str, Cell]]:
    return [(c.name, cell) for c in REGISTRY.values() for cell in cells if c.ours and cell.section in c.makes]


@pytest.mark.parametrize(
    ("name", "cell"),
    [(n, c) for n, c in ours_of(CELLS) if n not in CUDA_ONLY],
    ids=lambda x: x if isinstance(x, str) else f"{x.section}-{x.option or x.mask}",
)
def test_our_contenders_are_right_on_cpu(name: str, cell: Cell) -> None:
    contender = REGISTRY[name]
    problem = contender.cell(cell)
    tensors = Tensors.random(problem, CPU)
    calls, result = attention_timing.prepare(problem, [tensors], Truth.of(problem, tensors), contender, cell.section)
    assert len(calls) == 1, result.reason
    assert result.error is not None
    assert acceptable(problem, result.error)


def test_the_plain_way_to_float8_is_near_the_truth() -> None:
    cell = Cell("fp8_error", 1, 256, 256, 2, 2, 64, False)
    tensors = Tensors.random(cell, CPU)
    error = Truth.of(cell, tensors).error(REGISTRY["per-tensor"].makes["fp8_error"](cell, tensors)())
    assert 1e-3 < error < 0.7


def test_pages_and_contiguous_keys_are_the_same_keys() -> None:
    t = Tensors.random(DECODE, CPU)
    block = int(t.table[2, 1])
    assert torch.equal(t.k[2, 64 + 5, 1], t.stored_k[block, 1, 5])
    assert torch.equal(t.token_major_pages[0][block, 5, 1], t.stored_k[block, 1, 5])
    k, v = t.keys_of(DECODE, 2)
    assert torch.equal(k, t.k[2])
    assert torch.equal(v, t.v[2])


def test_shared_pages_are_shared_and_all_others_are_not() -> None:
    table = Tensors.random(SHARED, CPU).table
    assert table.shape == (4, 10)
    assert torch.equal(table[:, :6], table[:1, :6].expand(4, -1))
    assert table.unique().numel() == 6 + 4 * 4


def test_keys_of_float8_cells_are_float8_numbers() -> None:
    t = Tensors.random(FLOAT8, CPU)
    assert torch.equal((t.stored_k.float() / 0.5).to(torch.float8_e4m3fn).float() * 0.5, t.stored_k.float())


def test_a_pattern_has_its_density_in_every_row_and_its_diagonal() -> None:
    pattern = block_pattern(Cell("block_sparse", 1, 32768, 32768, 16, 16, 128, False, density=0.25))
    assert pattern.shape == (256, 256)
    assert bool((pattern.sum(1) == 64).all())
    assert bool(pattern.diagonal().all())


@pytest.mark.parametrize("causal", [False, True])
def test_padding_masks_of_users_are_what_ours_sees(causal: bool) -> None:
    cell = replace(PADDING, causal=causal)
    mask = key_padding_mask(cell, Tensors.random(cell, CPU)).expand(3, 1, 40, 40)
    for b in range(cell.batch):
        assert torch.equal(visible(cell, b, torch.arange(40), 40), mask[b, 0])


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: f"{c.section}-{c.option or c.mask}")
def test_every_sampled_row_sees_something(cell: Cell) -> None:
    for b in range(cell.batch):
        rows = sampled_rows(cell, b)
        keys = cell.lengths[b] if cell.section == "varlen" else cell.seqlen_k
        assert bool(visible(cell, b, rows, keys).any(1).all())


def test_visible_pairs_are_those_that_are_counted() -> None:
    for cell in (VARLEN, PADDING, replace(PADDING, causal=True), SPARSE, CHUNK):
        pairs = 0
        for b in range(cell.batch):
            rows = cell.lengths[b] if cell.section == "varlen" else cell.seqlen_q
            keys = rows if cell.section == "varlen" else cell.seqlen_k
            pairs += int(visible(cell, b, torch.arange(rows), keys).sum())
        half_diagonals = sum(cell.lengths or (cell.seqlen_q,)) / 2 if cell.causal else 0  # a square's half has none
        assert pairs == cell.pairs + half_diagonals
    for cell in (*FEATURES, *PATTERNS):
        seen = int(visible(cell, 0, torch.arange(512), 512).sum())
        assert seen - 512 // 2 <= cell.pairs <= seen  # a half's diagonal is whole


def test_the_error_of_a_wrong_mask_is_large_and_of_nan_is_nan() -> None:
    t = Tensors.random(FORWARD, CPU)
    truth = Truth.of(FORWARD, t)
    unmasked = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (t.q, t.k, t.v)), enable_gqa=True
    ).transpose(1, 2)
    assert truth.error(unmasked) > 0.1
    assert math.isnan(truth.error(torch.full_like(t.q, torch.nan)))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("wrong", [1, 2])
def test_gradients_of_keys_and_values_are_checked(causal: bool, wrong: int) -> None:
    cell = replace(FORWARD, section="backward", causal=causal, dtype="float32")
    t = Tensors.random(cell, CPU)
    truth = Truth.of(cell, t)
    gradients = REGISTRY[OURS].makes["backward"](cell, t)()
    assert isinstance(gradients, tuple)
    assert truth.error(gradients) < 1e-5
    gradients[wrong][:, :4] *= 1.5
    assert truth.error(gradients) > 0.01


def test_no_dropout_is_not_dropout() -> None:
    assert not acceptable(DROPOUT, 3e-3)
    assert acceptable(DROPOUT, 1 / 3)
    assert not acceptable(DROPOUT, 1.0)
    assert not acceptable(FORWARD, math.nan)


def test_dropout_is_checked_on_rows_that_see_many_keys() -> None:
    """The first rows are the largest, and all or nothing: 16 heads of them are untouched one time in five."""
    assert sampled_rows(replace(DROPOUT, seqlen_q=4096, seqlen_k=4096), 0)[0] == 512
    assert sampled_rows(FORWARD, 0)[0] == 0


def _broken(_cell: Cell, _t: Tensors) -> Call:
    raise NotImplementedError("no kernel for this\nand a long story")


def _wrong(_cell: Cell, t: Tensors) -> Call:
    return lambda: torch.full_like(t.q, torch.nan)


def _unwritten(cell: Cell, t: Tensors) -> Call:
    """Returns memory in which somebody else's right result is."""
    out = REGISTRY[OURS].makes["forward"](cell, t)()
    return lambda: out


def peer(make: object, name: str = "peer", section: str = "forward") -> Contender:
    return Contender(name, {section: make})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_broken, "NotImplementedError: no kernel for this"),
        (_wrong, "wrong result: relative error nan"),
        (_unwritten, "wrong result: relative error nan"),
    ],
)
def test_a_contender_that_fails_is_recorded_with_its_reason(make: object, reason: str) -> None:
    t = Tensors.random(FORWARD, CPU)
    calls, result = attention_timing.prepare(FORWARD, [t], Truth.of(FORWARD, t), peer(make), "forward")
    assert calls == []
    assert result == Result(None, reason)


class InstantWatch(Stopwatch):
    """Runs every call once and says it took a millisecond."""

    def __post_init__(self) -> None:
        self.runs = 0

    def times(self, calls: Sequence[Call]) -> list[float]:
        for call in calls:
            call()
            self.runs += 1
        return [1.0] * len(calls)


@pytest.mark.parametrize("cell", [FORWARD, DECODE, CHUNK], ids=lambda c: c.section)
def test_a_cell_is_timed_on_every_input_set(cell: Cell) -> None:
    watch = InstantWatch(CPU, flush=False)
    others = [peer(_broken, "peer", cell.section), peer(_wrong, "other", "x")]
    record = attention_timing.time_cell(cell, [REGISTRY[OURS], *others], watch, rounds=2)
    assert watch.runs == 2 * attention_timing.input_sets(cell, flush=False)
    assert record.results[OURS].ms == 1.0
    assert record.results["peer"].reason == "NotImplementedError: no kernel for this"
    assert "other" not in record.results


def test_a_dense_twin_is_timed_on_inputs_of_its_own() -> None:
    record = attention_timing.time_cell(
        VARLEN, [REGISTRY[OURS], REGISTRY["longwave-dense"]], InstantWatch(CPU), rounds=1
    )
    assert record.results[OURS].twin is None
    twin = record.results["longwave-dense"].twin
    assert twin is not None
    assert twin.section == "forward"
    assert record.ratio(OURS, "longwave-dense") == pytest.approx(VARLEN.flops / twin.flops)


def test_a_result_that_changes_while_it_is_timed_is_no_result() -> None:
    runs = 0

    def make(cell: Cell, t: Tensors) -> Call:
        right = REGISTRY[OURS].makes["forward"](cell, t)

        def call() -> torch.Tensor:
            nonlocal runs
            runs += 1
            return right() * (1 if runs < 3 else 2)

        return call

    record = attention_timing.time_cell(FORWARD, [peer(make)], InstantWatch(CPU), rounds=1)
    assert record.results["peer"].ms is None
    assert record.results["peer"].reason == "wrong after repeats: relative error 1.00e+00"


def test_inputs_rotate_where_nothing_is_flushed_and_calls_of_a_graph_have_their_own() -> None:
    assert attention_timing.input_sets(FORWARD, flush=False) == 8
    assert attention_timing.input_sets(FORWARD, flush=True) == 1
    assert attention_timing.input_sets(Cell("decode", 16, 1, 131072, 32, 8, 128, False, page=64), flush=False) == 1
    assert attention_timing.input_sets(replace(DECODE, section="latency", calls=32), flush=True) == 32


def test_a_captured_call_keeps_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph has addresses only: what a contender made for its call must live as long as the graph is replayed."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Mock)
    monkeypatch.setattr(torch.cuda, "graph", nullcontext)
    plan = torch.zeros(3)
    alive = weakref.ref(plan)

    def make(plan: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: plan + 1

    replay = attention_timing.captured([make(plan)])
    del plan
    gc.collect()
    assert alive() is not None
    assert replay().tolist() == [1.0, 1.0, 1.0]


def test_contenders_take_turns_and_the_median_of_all_rounds_counts() -> None:
    order: list[str] = []
    samples = iter([[1.0, 9.0], [4.0], [3.0, 2.0], [6.0]])

    def times(calls: Sequence[Call]) -> list[float]:
        calls[0]()
        return next(samples)

    calls = {name: [lambda name=name: order.append(name)] for name in ("a", "b")}
    assert alternate(calls, times, rounds=2) == {"a": 6.0, "b": 3.0}
    assert order == ["a", "b", "b", "a"]


@pytest.mark.parametrize("count", range(2, 9))
def test_each_contender_runs_behind_each_other_and_in_each_place_equally_often(count: int) -> None:
    orders = turns([str(number) for number in range(count)])
    neighbours = Counter(pair for order in orders for pair in pairwise(order))
    places = Counter(place for order in orders for place in enumerate(order))
    assert len(neighbours) == count * (count - 1)
    assert len(places) == count**2
    assert len({*neighbours.values(), *places.values()}) == 1


def test_a_contender_that_raises_leaves_the_race_and_the_others_stay() -> None:
    error = RuntimeError("out of memory")

    def times(calls: Sequence[Call]) -> list[float]:
        calls[0]()
        return [1.0]

    def fail() -> None:
        raise error

    assert alternate({"bad": [fail], "good": [lambda: None]}, times, rounds=2) == {"bad": error, "good": 1.0}
    with pytest.raises(ArithmeticError, match="bad: ") as caught:
        alternate_all({"good": [lambda: None], "bad": [fail]}, times, rounds=2)
    assert caught.value.__cause__ is error
    assert alternate_all({"good": [lambda: None]}, times, rounds=2) == {"good": 1.0}


def test_repeats_follow_the_budget_within_limits() -> None:
    assert (repeats(50, 1.0), repeats(50, 100.0), repeats(50, 1e-4)) == (50, 3, 300)
    assert repeats(5, 10.0, fewest=0) == 0


def test_every_section_has_ours_and_something_to_hold_it_against() -> None:
    for cell in CELLS:
        names = [c.name for c in chosen(cell.section, None, slow=False, flex=False)]
        assert OURS in names
        assert len(names) > 1 or cell.section == "latency"


def test_kernels_compile_ahead_side_by_side() -> None:
    cells = select(("forward", "dropout"), [64], None)
    calls = attention_timing.first_calls(cells, [REGISTRY[OURS], REGISTRY["cudnn"], REGISTRY["longwave-dense"]])
    assert {c.name for _, _, c in calls} == {OURS, "longwave-dense"}
    assert [(c.name, cell.section, cell.causal) for _, cell, c in calls[:6]] == [
        (OURS, "forward", True),
        (OURS, "forward", False),
        (OURS, "dropout", True),
        ("longwave-dense", "forward", True),
        (OURS, "dropout", False),
        ("longwave-dense", "forward", False),
    ]
    assert len(calls) == 14 + 2 * 2


def test_slow_contenders_and_flex_attention_are_timed_when_asked_for() -> None:
    def names(**asked: bool) -> set[str]:
        return {c.name for c in chosen("forward", None, **{"slow": False, "flex": False} | asked)}

    assert names(slow=True) - names() == {"longwave-generic", "mem-eff"}
    assert names(flex=True) - names() == {FLEX}
    assert [c.name for c in chosen("decode", ["fa3", OURS], slow=False, flex=False)] == [OURS, "fa3"]


def test_packages_that_are_not_there_are_not_timed() -> None:
    assert not found("no_such_package")
    assert not found("no_such_package.inside")
    assert found("torch.nn")
