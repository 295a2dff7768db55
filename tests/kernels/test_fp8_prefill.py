"""The Hopper forward over pages of float8_e4m3fn, against attention over what the bytes stand for."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention_backend.jit import build_variants, default_cache
from attention_backend.kernels.hopper_variants import HopperOptions, hopper_variant
from attention_backend.kernels.variants import Options
from attention_backend.problem import AttentionArgs

from . import test_split_kv
from .error_rule import assert_lse_close, assert_out_close, poisoned_memory
from .oracle import attention
from .problems import DTYPES, Case, build, generator
from .public import flash_attn_with_kvcache
from .test_extremes import ANYWHERE
from .test_fp8_kv import FP8, NAN_BYTE, dequantised
from .test_graphs import captured

SMALL = Case(70, 150, batch=2, heads=6, kv_heads=2, dim=128, dim_v=128, layout="paged_varlen")
DIMS = [(16, 16), (48, 48), (64, 64), (80, 80), (96, 96), (128, 128), (64, 128)]
ROWS = (1, 63, 65, 127, 129, 257)
KEYS = (1, 63, 65, 127, 129, 509)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """The kernels of most cases, on all cores."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return
    options = [Options(dtype, dim, dim, paged=True) for dtype in DTYPES.values() for dim in (64, 80, 96, 128)]
    variants = (
        hopper_variant(HopperOptions(each, page_size=64, fp8=True, left_bounds=bounds), pack=pack, split=split)
        for each in options
        if each.dtype != torch.float32
        for pack in (False, True)
        for split in (False, True)
        for bounds in (False, True)
    )
    build_variants(variants, default_cache())


def rounded(args: AttentionArgs) -> AttentionArgs:
    """Keys and values as e4m3, with a scale per head that is no power of two, of which none makes more than 448 of a
    normal number (that would be NaN). NaN stays NaN."""
    g = generator("scales", args.q.device)
    scales = [0.02 + torch.rand(args.num_kv_heads, device=args.q.device, generator=g) / 8 for _ in "kv"]
    k, v = ((x.float() / scale[:, None]).to(FP8) for x, scale in zip((args.k, args.v), scales, strict=True))
    return replace(args, k=k, v=v, k_scale=scales[0], v_scale=scales[1])


def problem(case: Case, device: torch.device) -> AttentionArgs:
    """NaN in every slot out of sight."""
    return rounded(build(case, device))


def forward(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    from attention_backend.kernels import flash_fwd_sm90

    with poisoned_memory():
        return flash_fwd_sm90.forward(args)


def check(args: AttentionArgs) -> None:
    out, lse = forward(args)
    truth, truth_lse = attention(dequantised(args, torch.float64))
    same_dtype, _ = attention(dequantised(args, args.dtype), args.dtype, reorder=True)
    assert out.dtype == args.dtype
    assert_out_close(out, truth, same_dtype)
    assert_lse_close(lse, truth_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_head_dim_meets_the_error_rule(dims: tuple[int, int], dtype: str, hopper: torch.device) -> None:
    check(problem(replace(SMALL, dim=dims[0], dim_v=dims[1], dtype=dtype), hopper))


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 3])
def test_a_thousand_repeats_are_bitwise_equal(splits: int, hopper: torch.device) -> None:
    from attention_backend.kernels import flash_fwd_sm90

    args = problem(replace(SMALL, sq=300, sk=2001, batch=3, num_splits=splits), hopper)
    want, want_lse = forward(args)
    differing = torch.zeros((), dtype=torch.int64, device=hopper)
    for _ in range(1000):
        out, lse = flash_fwd_sm90.forward(args)
        differing += (out != want).any() | (lse != want_lse).any()
    assert int(differing) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("rows", ROWS)
def test_every_length_meets_the_error_rule(rows: int, keys: int, hopper: torch.device) -> None:
    check(problem(replace(SMALL, layout="paged", batch=3, sq=rows, sk=keys), hopper))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", ["full", "causal", "window", "sliding", "lookahead", "chunk"])
def test_every_mask_meets_the_error_rule(mask: str, dim: int, hopper: torch.device) -> None:
    check(problem(replace(SMALL, sq=150, sk=601, batch=3, mask=mask, dim=dim, dim_v=dim), hopper))


@pytest.mark.gpu
@pytest.mark.parametrize("hnd", [False, True])
@pytest.mark.parametrize("page", [16, 48, 64, 128, 256])
def test_every_page_meets_the_error_rule(page: int, hnd: bool, hopper: torch.device) -> None:
    check(problem(replace(SMALL, sk=601, page=page, hnd=hnd), hopper))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(1, 1), (6, 6), (8, 1), (10, 2), (32, 8)])
@pytest.mark.parametrize("dim", [64, 128])
def test_every_group_meets_the_error_rule(heads: tuple[int, int], dim: int, hopper: torch.device) -> None:
    check(problem(replace(SMALL, heads=heads[0], kv_heads=heads[1], dim=dim, dim_v=dim, sinks=True), hopper))


@pytest.mark.gpu
@pytest.mark.parametrize("keys", ["leftpad", "key_mask"])
def test_keys_that_are_left_out_meet_the_error_rule(keys: str, hopper: torch.device) -> None:
    if keys == "leftpad":
        check(problem(replace(SMALL, keys=keys), hopper))
        return
    args = problem(SMALL, hopper)
    assert args.block_table is not None
    width = args.block_table.shape[1] * args.k.shape[1]
    check(replace(args, key_mask=torch.rand((args.batch, width), device=hopper) < 0.7))


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [2, 7])
@pytest.mark.parametrize("case", [c for c in test_split_kv.CASES if c.page and c.dim <= 128], ids=str)
def test_split_keys_meet_the_error_rule(case: test_split_kv.Chunks, splits: int, hopper: torch.device) -> None:
    check(replace(rounded(test_split_kv.build(case, hopper)), num_splits=splits))


@pytest.mark.gpu
@pytest.mark.parametrize("case", test_split_kv.RAGGED, ids=str)
def test_parts_that_the_device_chooses_meet_the_error_rule(case: test_split_kv.Chunks, hopper: torch.device) -> None:
    check(rounded(test_split_kv.build(case, hopper)))


@pytest.mark.gpu
@pytest.mark.parametrize("change", ANYWHERE, ids=lambda x: x.__name__)
@pytest.mark.parametrize("dim", [64, 128])
def test_extremes_meet_the_error_rule(change: object, dim: int, hopper: torch.device) -> None:
    assert callable(change)
    check(change(problem(replace(SMALL, dim=dim, dim_v=dim), hopper)))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("power", [-60, -20, 20, 90])
def test_queries_beyond_the_range_of_fp16_lose_nothing(power: int, dim: int, hopper: torch.device) -> None:
    """A power of two on the queries, taken back by the softmax scale, changes no bit."""
    args = problem(replace(SMALL, dim=dim, dim_v=dim), hopper)
    far = replace(args, q=args.q * 2.0**power, softmax_scale=args.softmax_scale * 2.0**-power)
    for a, b in zip(forward(args), forward(far), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("value", [0.0, -0.05])
def test_scales_of_zero_and_below_are_numbers_like_others(value: float, dim: int, hopper: torch.device) -> None:
    args = problem(replace(SMALL, dim=dim, dim_v=dim), hopper)
    assert args.k_scale is not None
    assert args.v_scale is not None
    args.k_scale[0], args.v_scale[1] = value, value
    check(args)


@pytest.mark.gpu
def test_rows_of_zeros_see_all_keys_alike(hopper: torch.device) -> None:
    args = problem(SMALL, hopper)
    args.q[::3] = 0
    check(args)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_many_small_terms_beside_a_large_one_are_not_lost(dim: int, hopper: torch.device) -> None:
    """4,095 terms of 2^-25 each beside a one: what fp16 rounds to zero is a ten-thousandth of the output here, and more
    the longer a row is."""
    args = replace(
        problem(Case(1, 4096, batch=1, heads=64, kv_heads=1, dim=dim, dim_v=dim, layout="paged"), hopper),
        window_right=-1,
        softmax_scale=1.0,
    )
    assert args.block_table is not None
    one = torch.ones(1, device=hopper)
    args.q.zero_()[..., 0] = 1.0
    k, v = torch.zeros(args.k.shape, device=hopper), torch.ones(args.v.shape, device=hopper)
    k[..., 0] = -17.3125  # rounds to -18 in e4m3: 2^-26
    k[int(args.block_table[0, 0]), 0, :, 0], v[int(args.block_table[0, 0]), 0] = 0.0, 0.0
    args = replace(args, k=k.to(FP8), v=v.to(FP8), k_scale=one, v_scale=one)
    out, _ = forward(args)
    truth, _ = attention(dequantised(args, torch.float64))
    torch.testing.assert_close(out.double(), truth, rtol=0.01, atol=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["k", "v"])
def test_a_nan_that_is_seen_is_not_hidden(name: str, hopper: torch.device) -> None:
    args = problem(replace(SMALL, batch=1, mask="full"), hopper)
    assert args.block_table is not None
    getattr(args, name).view(torch.uint8)[int(args.block_table[0, 1]), 7, 1, 5] = NAN_BYTE
    out, _ = forward(args)
    assert not out[:, :3].isnan().any()
    assert out[:, 3:].isnan().flatten(1).any(1).all()


@pytest.mark.gpu
def test_flash_attentions_function_takes_many_rows_over_float8_pages(hopper: torch.device) -> None:
    args = problem(replace(SMALL, layout="paged", batch=1), hopper)
    out = flash_attn_with_kvcache(
        args.q, args.k, args.v, cache_seqlens=args.seqused_k, block_table=args.block_table, causal=True,
        k_scale=args.k_scale, v_scale=args.v_scale,
    )  # fmt: skip
    assert torch.equal(out, forward(args)[0])


@pytest.mark.gpu
def test_a_graph_follows_lengths_that_change_between_replays(cuda: torch.device) -> None:
    if torch.cuda.get_device_capability(cuda) != (9, 0):
        pytest.skip("needs a Hopper")
    args = problem(replace(SMALL, sq=100, sk=2000, batch=3, heads=32, kv_heads=8, layout="paged"), cuda)
    for cache in (args.k, args.v):
        cache.view(torch.uint8)[cache.float().isnan()] = 0x11
    graph, out = captured(lambda: forward(args)[0])
    assert args.seqused_k is not None
    for lens in ([2000, 0, 100], [1, 1, 700], [0, 0, 0]):
        args.seqused_k.copy_(torch.tensor(lens))
        graph.replay()
        assert torch.equal(out, forward(args)[0])
