"""Gradients through the public door: gradcheck on the CPU path, the table of backward kernels, and what it refuses."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_backend import attention_with_lse, backward, dispatch
from attention_backend.errors import UnsupportedError
from attention_backend.heuristics.sm80 import HEAD_DIM_TILES, SHARED_MEMORY
from attention_backend.heuristics.sm80_backward import (
    FEWEST_KEYS,
    backward_config,
    group_parts,
    is_short,
    section_lines,
)
from attention_backend.jit.spec import ARCHS
from attention_backend.problem import AttentionArgs


def tensors(rows: int = 5, keys: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = ((2, rows, 4, 3), (2, keys, 2, 3), (2, keys, 2, 2))
    q, k, v = (torch.randn(shape, dtype=torch.float64, generator=g) for shape in shapes)
    return q, k, v


def args(**options: Any) -> AttentionArgs:
    return AttentionArgs(*tensors(), 0.6, **options)


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def doubles(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def varlen() -> AttentionArgs:
    q, k, v = (x.flatten(0, 1) for x in tensors())
    return AttentionArgs(q, k, v, 0.6, i32(0, 4, 4, 10), i32(0, 6, 9, 14), 6, 6, window_right=0)


PROBLEMS: dict[str, Callable[[], AttentionArgs]] = {
    "full": args,
    "causal": lambda: args(window_right=0),
    "window": lambda: args(window_left=2, window_right=1),
    "chunk": lambda: args(window_right=0, chunk_size=3),
    "softcap": lambda: args(softcap=1.5, window_right=0),
    "alibi": lambda: args(alibi_slopes=torch.tensor([0.5, 0.25, 0.1, 0.7])),
    "sinks": lambda: args(sinks=doubles(4)),
    "bias": lambda: args(bias=doubles(1, 4, 5, 7)),
    "padding": lambda: args(seqused_k=i32(4, 0), leftpad_k=i32(1, 0)),
    "key mask": lambda: args(key_mask=torch.tensor([[1, 0, 1, 1, 0, 1, 1], [0, 0, 0, 1, 1, 1, 1]]).bool()),
    "descriptor": lambda: args(mask_desc=torch.tensor([[1, 6, 2, -1, 0, 0, 0, 0], [0, 7, -2, 3, 0, 4, 0, 0]]).int()),
    "dropout": lambda: args(dropout_p=0.3, dropout_seed=torch.tensor([5, 6]), window_right=0),
    "varlen": varlen,
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_of_out_and_lse_pass_gradcheck(name: str) -> None:
    problem = PROBLEMS[name]()
    names = [n for n in ("q", "k", "v", "bias", "sinks") if getattr(problem, n) is not None]

    def call(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        changes: dict[str, Any] = dict(zip(names, leaves, strict=True))
        out, lse = attention_with_lse(replace(problem, **changes))
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    leaves = [getattr(problem, n).clone().requires_grad_() for n in names]
    assert torch.autograd.gradcheck(call, leaves, nondet_tol=0.0)


def test_a_gradient_of_lse_alone_needs_none_of_out() -> None:
    problem = args(window_right=0)
    q = problem.q.clone().requires_grad_()
    _, lse = attention_with_lse(replace(problem, q=q))
    (gradient,) = torch.autograd.grad(lse.sum(), q)
    assert bool((gradient != 0).any())


def test_a_backward_is_counted_by_its_kernels_name() -> None:
    before = dispatch.calls().get("cpu_reference_backward", 0)
    problem = args()
    out, lse = dispatch.run(problem)
    backward.run(problem, out, lse, out)
    assert dispatch.calls()["cpu_reference_backward"] == before + 1


def test_a_named_kernel_is_taken_or_refused_never_replaced() -> None:
    problem = args()
    out, lse = dispatch.run(problem)
    with pytest.raises(UnsupportedError, match="no flash_bwd_sm80 serves this call"):
        backward.run(problem, out, lse, out, kernel="flash_bwd_sm80")
    with pytest.raises(ValueError, match="no backward kernel 'flash': give one of flash_bwd_sm90, flash_bwd_sm80"):
        backward.run(problem, out, lse, out, kernel="flash")


def test_what_nothing_serves_is_refused_with_what_is_served() -> None:
    problem = args()
    with pytest.raises(
        UnsupportedError, match=r"no backward kernel serves this call:\n  flash_bwd_sm90 \(cuda\) serves"
    ):
        backward.select(replace(problem, q=problem.q.to("meta")))


def test_the_table_is_described_a_line_a_kernel() -> None:
    lines = list(backward.describe())
    assert [line.split(" ")[0] for line in lines] == [line.kernel for line in backward.TABLE]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tile", HEAD_DIM_TILES)
@pytest.mark.parametrize("tile_v", HEAD_DIM_TILES)
@pytest.mark.parametrize("short", [False, True])
def test_a_backward_tile_fits_every_pair_of_widths_on_every_architecture(
    arch: str, tile: int, tile_v: int, short: bool
) -> None:
    config = backward_config(arch, tile, tile_v, short=short)
    assert config.min_blocks * config.smem_bytes(tile, tile_v) <= SHARED_MEMORY[arch]
    assert 128 % config.block_m == 0
    assert config.fits(tile, tile_v)
    assert config.block_n >= FEWEST_KEYS


@pytest.mark.parametrize(("keys", "served"), [(65535 * 32, True), (65535 * 32 + 1, False)])
def test_more_key_tiles_than_a_grid_has_are_refused_before_the_launch(keys: int, served: bool) -> None:
    """Tiles of keys are the grid's second dimension, of at most 65,535 blocks."""
    q = torch.zeros(1, 1, 1, 16, dtype=torch.float16)
    k = torch.zeros(1, 1, 1, 16, dtype=torch.float16).expand(1, keys, 1, 16)
    line = next(line for line in backward.TABLE if line.kernel == "flash_bwd_sm80")
    reasons = list(line.refusals(AttentionArgs(q, k, k, 1.0)))
    assert any(f"{keys} keys" in reason for reason in reasons) != served


def test_short_sequences_have_smaller_tiles_where_these_were_measured() -> None:
    assert is_short(64, 512, tapered=False)
    assert is_short(128, 512, tapered=True)
    assert not is_short(128, 512, tapered=False)
    assert not is_short(64, 4096, tapered=True)
    assert backward_config("sm_90a", 128, 128, short=True).block_n < backward_config("sm_90a", 128, 128).block_n
    assert backward_config("sm_80", 128, 128, short=True) == backward_config("sm_80", 128, 128)


def test_halves_of_a_block_take_equal_parts_of_key_and_value_gradients() -> None:
    config = backward_config("sm_90a", 256, 256)
    assert (config.split, config.num_warps, config.key_warps) == (True, 8, 1)  # a half has four warps along the width
    assert config.fits(64, 64)
    assert not config.fits(32, 32)
    assert not config.fits(192, 128)  # a warp of one half would have more sums than one of the other
    whole = replace(config, split=False)
    assert whole.fits(256, 128)
    assert not whole.fits(64, 64)  # eight warps


@pytest.mark.parametrize(
    ("blocks", "group", "parts"), [(1000, 8, 1), (99, 8, 1), (98, 8, 2), (40, 6, 3), (1, 7, 7), (50, 5, 5), (1, 1, 1)]
)
def test_groups_are_shared_by_as_few_blocks_as_fill_the_device(blocks: int, group: int, parts: int) -> None:
    assert group_parts(blocks, group, 132, tapered=False) == parts
    assert group_parts(2 * blocks, group, 132, tapered=True) == parts


@pytest.mark.parametrize(
    ("rows", "lines", "tapered", "section"),
    [
        (32768, 32, False, 3),  # 17 MB a line of 50 MB, and 342 tiles of keys for 264 blocks
        (8192, 64, False, 11),  # 12 of them fit: six sections as even as can be
        (512, 512, False, 171),  # 196 of them fit
        (8192, 13, False, 7),
        (8192, 13, True, 13),  # 7 fill the device twice, and the rest would not
        (512, 30, False, 30),  # too few for more than one section
        (64, 1, True, 1),
    ],
)
def test_sections_fit_the_cache_and_fill_the_device(rows: int, lines: int, tapered: bool, section: int) -> None:
    config = backward_config("sm_90a", 64, 64)
    assert section == section_lines(
        config, 64, 64, rows=rows, lines=lines, key_tiles=-(-rows // config.block_n), num_sms=132,
        l2_bytes=50 << 20, tapered=tapered,
    )  # fmt: skip


def test_a_grid_has_no_more_sections_than_it_may() -> None:
    config = backward_config("sm_90a", 64, 64)
    section = section_lines(
        config, 64, 64, rows=1 << 20, lines=200_000, key_tiles=10_923, num_sms=132, l2_bytes=1, tapered=False
    )
    assert -(-200_000 // section) <= 65_535
