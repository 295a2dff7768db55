"""Merging softmax states on the device, against the formula in float64: counts, layouts, states that saw nothing."""

import pytest
import torch
from torch import Tensor

from attention_backend.reference import merge as reference
from attention_backend.shared_prefix import merge_states

from .error_rule import poisoned_memory
from .problems import DTYPES, generator, randn

HEAD_DIMS = (8, 32, 64, 80, 96, 128, 192, 256)
Shape = tuple[int, int, int, int]  # batch, rows, heads, head_dim


def states(count: int, shape: Shape, dtype: torch.dtype, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """outs `[count, batch, rows, heads, head_dim]` and lses `[count, batch, heads, rows]`; a third have seen nothing,
    and hold NaN."""
    outs = randn((count, *shape), dtype, g)
    lses = 4 * randn((count, shape[0], shape[2], shape[1]), torch.float32, g)
    dead = torch.rand(lses.shape, device=g.device, generator=g) < 0.3
    return outs.masked_fill(dead.transpose(2, 3).unsqueeze(-1), torch.nan), lses.masked_fill(dead, -torch.inf)


def assert_merged(result: tuple[Tensor, Tensor], outs: list[Tensor], lses: list[Tensor], sinks: Tensor | None) -> None:
    """Within the rounding of the output's dtype, and of float32 sums."""
    out, lse = result
    exact = None if sinks is None else sinks.double()
    want, want_lse = reference.merge_states([x.double() for x in outs], [x.double() for x in lses], exact)
    assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)
    error, allowed = (out - want).abs(), torch.finfo(out.dtype).eps * want.abs() + 1e-5
    assert bool((error <= allowed).all()), f"error {error.max().item():.3e}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("count", [1, 2, 8, 9, 20])
def test_states_of_every_head_dim_merge(count: int, dim: int, dtype: str, device: torch.device) -> None:
    g = generator(("merge", count, dim, dtype), device)
    for shape, sinks in (((1, 1, 1, dim), None), ((3, 5, 6, dim), randn((6,), torch.float32, g))):
        outs, lses = (list(x) for x in states(count, shape, DTYPES[dtype], g))
        with poisoned_memory():
            result = merge_states(outs, lses, sinks=sinks)
        assert_merged(result, outs, lses, sinks)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [0, 1, 2, 7, 33, 128])
@pytest.mark.parametrize("layout", ["dense", "varlen"])
def test_partial_results_and_one_more_state_merge(layout: str, splits: int, dtype: str, cuda: torch.device) -> None:
    from attention_backend.kernels import flash_merge

    shape: Shape = (1, 77, 8, 128) if layout == "varlen" else (3, 26, 8, 128)
    g = generator(("partials", splits, dtype, layout), cuda)
    partial_out, partial_lse = states(splits, shape, torch.float32, g)
    outs, lses = states(1, shape, DTYPES[dtype], g)
    sinks = randn((8,), DTYPES[dtype], g) if splits % 2 else None
    for extra in (None, (outs[0], lses[0])):
        with poisoned_memory():
            out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
        flat = partial_out.flatten(1, 2)  # [S, rows, heads, head_dim], whatever the queries are
        if layout == "varlen":
            own = None if extra is None else (extra[0].squeeze(0), extra[1].squeeze(0))
            flash_merge.merge(flat, partial_lse.squeeze(1), out.squeeze(0), lse.squeeze(0), sinks=sinks, extra=own)
        else:
            flash_merge.merge(flat, partial_lse, out, lse, sinks=sinks, extra=extra)
        if splits == 0 and extra is None:
            assert not out.any()
            assert bool((lse == -torch.inf).all())
            continue
        more = ([], []) if extra is None else ([extra[0]], [extra[1]])
        assert_merged((out, lse), [*partial_out, *more[0]], [*partial_lse, *more[1]], sinks)


@pytest.mark.gpu
def test_one_state_passes_through_unchanged(device: torch.device) -> None:
    g = generator("lone", device)
    out, lse = randn((33, 4, 64), torch.bfloat16, g), randn((4, 33), torch.float32, g)
    merged, merged_lse = merge_states([out], [lse])
    assert torch.equal(merged, out)
    assert torch.equal(merged_lse, lse)


@pytest.mark.gpu
def test_sizes_of_scores_do_not_matter(device: torch.device) -> None:
    """Only differences of log-sum-exps do: far from zero, and far from a sink."""
    g = generator("sizes", device)
    for offset in (-1e4, 1e4):
        outs, lses = (list(x) for x in states(3, (2, 3, 4, 64), torch.float32, g))
        merged, _ = merge_states(outs, lses)
        moved, moved_lse = merge_states(outs, [x + offset for x in lses])
        torch.testing.assert_close(moved, merged, atol=5e-3, rtol=5e-3)  # lse + 1e4 itself is rounded
        sunk, sunk_lse = merge_states(outs, [x + offset for x in lses], sinks=torch.zeros(4, device=device))
        if offset > 0:
            torch.testing.assert_close(sunk_lse, moved_lse)
        else:
            assert not sunk.any()


@pytest.mark.gpu
def test_rows_past_two_to_the_31_elements_merge(cuda: torch.device) -> None:
    """Two partial results of 1.2e9 elements each, so the second starts where 32 bits end soon after."""
    from attention_backend.kernels import flash_merge

    rows, heads, dim = 150_000, 64, 128
    partial_out = torch.empty((2, rows, heads, dim), dtype=torch.float32, device=cuda)
    partial_out[0], partial_out[1] = 1.0, 3.0
    partial_lse = torch.zeros((2, heads, rows), dtype=torch.float32, device=cuda)
    out = torch.full((rows, heads, dim), torch.nan, dtype=torch.bfloat16, device=cuda)
    lse = torch.full((heads, rows), torch.nan, device=cuda)
    flash_merge.merge(partial_out, partial_lse, out, lse)
    assert bool((out == 2.0).all())
    torch.testing.assert_close(lse, torch.full_like(lse, 2.0).log())


@pytest.mark.gpu
def test_a_thousand_repeats_are_bitwise_equal(device: torch.device) -> None:
    outs, lses = (list(x) for x in states(5, (4, 65, 8, 128), torch.bfloat16, generator("repeats", device)))
    want, want_lse = merge_states(outs, lses)
    differing = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(1000 if device.type == "cuda" else 3):
        out, lse = merge_states(outs, lses)
        differing += (out != want).any() | (lse != want_lse).any()
    assert int(differing) == 0


def test_bfloat16_states_merge_on_cpu() -> None:
    g = generator("cpu", torch.device("cpu"))
    outs, lses = (list(x) for x in states(4, (2, 5, 4, 32), torch.bfloat16, g))
    assert_merged(merge_states(outs, lses), outs, lses, None)
