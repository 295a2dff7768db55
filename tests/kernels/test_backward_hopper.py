"""What only the Hopper backward has: blocks that draw many tiles, groups shared out, a kernel for large heads."""

from dataclasses import replace

import pytest
import torch

from attention_backend import backward, dispatch
from attention_backend.heuristics import sm90_backward
from attention_backend.heuristics.sm90_backward import BackwardTile, backward_tile, backward_tiles, query_parts
from attention_backend.kernels import flash_bwd_sm90, workspace
from attention_backend.problem import AttentionArgs

from .backward_oracle import check
from .problems import Case, build, generator, randn

KERNEL = "flash_bwd_sm90"
WIDTHS = ((64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256), (72, 104), (128, 64), (32, 256))


def many_tiles(dim: int, dim_v: int) -> Case:
    """About 1,600 tiles of keys, most of them of lengths that most sequences do not have."""
    return Case(190, 700, batch=40, heads=8, kv_heads=8, dim=dim, dim_v=dim_v, layout="varlen")


@pytest.mark.gpu
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_blocks_that_draw_many_tiles_of_unequal_sequences(widths: tuple[int, int], hopper: torch.device) -> None:
    check(build(many_tiles(*widths), hopper), KERNEL, with_lse=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_group_is_shared_out_where_tiles_are_few(dim: int, deterministic: bool, hopper: torch.device) -> None:
    case = Case(500, 300, batch=1, heads=32, kv_heads=1, dim=dim, dim_v=dim, mask="full")
    tile = backward_tile(dim, dim)
    parts = query_parts(
        tile,
        seqlen_q=case.sq,
        key_tiles=-(-case.sk // tile.block_n),
        lines=1,
        group=32,
        num_sms=132,
        tapered=False,
        deterministic=deterministic,
    )
    assert parts > 1
    check(replace(build(case, hopper), deterministic=deterministic), KERNEL)


OTHER_TILES = [tile for dim in (64, 96, 128) for tile in backward_tiles(dim, dim)[1:]]


def serves(tile: BackwardTile, case: Case) -> bool:
    plain = case.keys == "all" and case.score == "plain"
    return plain or tile == backward_tile(tile.head_dim, tile.head_dim_v, extras=True)


#: Steps with and without a mask, tiles that end in the middle of a step, rows and keys that see nothing.
FEW_TILES = (
    Case(330, 300, batch=2, heads=4, kv_heads=2, layout="varlen"),
    Case(261, 390, batch=2, heads=4, kv_heads=1, mask="sliding", dtype="fp16"),
    Case(200, 300, batch=1, heads=4, kv_heads=4, layout="bhsd", mask="full", keys="key_mask", score="softcap"),
)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tile", "case"),
    [(tile, case) for tile in OTHER_TILES for case in FEW_TILES if serves(tile, case)],
    ids=lambda x: f"d{x.head_dim}-{x}" if isinstance(x, BackwardTile) else str(x),
)
def test_tiles_that_are_not_the_default(tile: BackwardTile, case: Case, hopper: torch.device) -> None:
    args = build(replace(case, dim=tile.head_dim, dim_v=tile.head_dim_v), hopper)
    for deterministic in (False, True):
        check(replace(args, deterministic=deterministic), KERNEL, with_lse=True, tile=tile)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", OTHER_TILES, ids=lambda tile: f"d{tile.head_dim}-{tile}")
def test_tiles_that_are_not_the_default_draw_many(tile: BackwardTile, hopper: torch.device) -> None:
    check(build(many_tiles(tile.head_dim, tile.head_dim_v), hopper), KERNEL, tile=tile)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize(("mask", "num_sms"), [("full", 2), ("causal", 2), ("causal", 20)])
def test_dq_is_finished_a_section_later(
    mask: str, num_sms: int, dim: int, deterministic: bool, hopper: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whoever draws a tile. Nobody waits for blocks that do not run yet, as most of 20 in the emulator."""
    monkeypatch.setattr(sm90_backward, "_SECTION_BYTES", 1)
    monkeypatch.setattr(flash_bwd_sm90.device, "num_sms", lambda _: num_sms)
    for heads, kv_heads in ((4, 2), (3, 3), (4, 1)):
        case = Case(100, 330, batch=num_sms, heads=heads, kv_heads=kv_heads, dim=dim, dim_v=dim, mask=mask)
        args = build(case, hopper)
        check(replace(args, deterministic=deterministic), KERNEL, with_lse=True)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1e-40, 1e-6, 8.0])
@pytest.mark.parametrize("dim", [64, 128])
def test_any_softmax_scale(scale: float, dim: int, hopper: torch.device) -> None:
    """Products begin with lse over the scale, or are scaled afterwards; 8: each row's softmax is one key, or a few."""
    args = build(Case(130, 200, batch=2, heads=4, kv_heads=2, dim=dim, dim_v=dim), hopper)
    check(replace(args, softmax_scale=scale), KERNEL, with_lse=True)


@pytest.mark.gpu
def test_counters_are_left_at_zero(hopper: torch.device) -> None:
    args = build(many_tiles(64, 64), hopper)
    _gradients(args)
    torch.cuda.synchronize()
    assert not workspace.counters(hopper, 2)[:2].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_deterministic_sums_do_not_depend_on_who_runs_beside(dim: int, hopper: torch.device) -> None:
    """Another stream takes SMs away meanwhile, so tiles are drawn by other blocks and later."""
    args = replace(
        build(Case(2000, 2000, batch=2, heads=8, kv_heads=4, dim=dim, dim_v=dim), hopper), deterministic=True
    )
    want = _gradients(args)
    beside, busy = torch.cuda.Stream(hopper), torch.randn(8192, 8192, device=hopper, dtype=torch.bfloat16)
    for _ in range(20):
        with torch.cuda.stream(beside):
            busy @ busy
        got = _gradients(args)
        assert torch.equal(got.dq, want.dq)
        assert torch.equal(got.dk, want.dk)
        assert torch.equal(got.dv, want.dv)


def _gradients(args: AttentionArgs) -> backward.Gradients:
    out, lse = dispatch.run(args)
    grad_out = randn(args.out_shape, args.dtype, generator("grad_out", args.q.device))
    return backward.run(args, out, lse, grad_out, kernel=KERNEL)
