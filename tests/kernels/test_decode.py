"""Few query rows over long caches: split counts, GQA groups, lengths from 0 to 131,072, batches up to 64."""

from dataclasses import replace

import pytest
import torch

from attention_backend import dispatch
from attention_backend.problem import AttentionArgs

from .error_rule import check, poisoned_memory, run
from .problems import Case, block_table, build, generator, pool, randn

CPU = torch.device("cpu")
SPLITS = (1, 3, 0)  # 0: the heuristic decides
GROUPS = (1, 4, 5, 8, 16, 32)
LENGTHS = (1, 2, 15, 16, 63, 64, 65, 127, 1000, 4096, 16384)


def decode(
    lens: list[int],
    *,
    device: torch.device,
    group: int = 4,
    kv_heads: int = 2,
    rows: int = 1,
    splits: int = 0,
    page: int = 64,
    dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
) -> AttentionArgs:
    """One decode step: `rows` causal query rows for each of `lens` cached keys, through shuffled pages."""
    name = (lens[:8], group, kv_heads, rows, splits, page, dim)
    g = generator(name, device)
    num_blocks = sum(-(-n // page) for n in lens) + 1
    k, v = (pool(num_blocks, page, kv_heads, dim, dtype, g, hnd=True) for _ in range(2))
    return AttentionArgs(
        randn((len(lens), rows, kv_heads * group, dim), dtype, g),
        k,
        v,
        dim**-0.5,
        max_seqlen_k=max(1, *lens),
        seqused_k=torch.tensor(lens, dtype=torch.int32, device=device),
        block_table=block_table(lens, page, num_blocks, generator(name, CPU)).to(device),
        window_right=0,
        num_splits=splits,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_every_group_and_row_count_meets_the_error_rule(
    rows: int, group: int, splits: int, device: torch.device
) -> None:
    check(decode([1000, 8, 0, 129], device=device, group=group, rows=rows, splits=splits))


@pytest.mark.gpu
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_meets_the_error_rule(length: int, splits: int, device: torch.device) -> None:
    check(decode([length], device=device, splits=splits))


@pytest.mark.gpu
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("lens", [[131_072], [131_071, 5, 0, 70_000]], ids=["one", "uneven"])
def test_a_long_context_meets_the_error_rule(lens: list[int], splits: int, device: torch.device) -> None:
    check(decode(lens, device=device, splits=splits, kv_heads=8))


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [2, 7, 32, 64])
@pytest.mark.parametrize("splits", SPLITS)
def test_every_batch_size_meets_the_error_rule(batch: int, splits: int, device: torch.device) -> None:
    lens = [0 if b % 5 == 3 else 1 + (b * 977) % 2500 for b in range(batch)]
    check(decode(lens, device=device, splits=splits, kv_heads=8))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("page", [16, 64, 48, 1])
def test_every_head_dim_and_page_meets_the_error_rule(
    dim: int, dtype: torch.dtype, page: int, device: torch.device
) -> None:
    check(decode([777, 64, 1], device=device, dim=dim, dtype=dtype, page=page))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["dense", "bhsd", "varlen", "paged_varlen"])
@pytest.mark.parametrize("mask", ["causal", "sliding", "chunk", "window"])
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_options_meet_the_error_rule(layout: str, mask: str, sinks: bool, device: torch.device) -> None:
    score = "softcap" if mask == "window" else "alibi" if mask == "chunk" else "plain"
    for rows in (1, 5):
        check(build(Case(rows, 900, batch=6, layout=layout, mask=mask, sinks=sinks, score=score, dim=128), device))


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [0, 7])
@pytest.mark.parametrize("dim", [32, 72, 96, 128, 256])
@pytest.mark.parametrize(("group", "rows", "page"), [(4, 1, 64), (8, 2, 16), (8, 8, 64), (5, 3, 48), (1, 1, 1)])
def test_the_kernel_of_all_gpus_meets_the_error_rule(
    group: int, rows: int, page: int, dim: int, splits: int, cuda: torch.device
) -> None:
    from attention_backend.kernels import flash_decode

    args = decode([3000, 8, 0, 129], device=cuda, group=group, rows=rows, page=page, dim=dim, splits=splits)
    with poisoned_memory():
        result = flash_decode.forward(args, tma=False)
    check(args, result)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [0, 7])
@pytest.mark.parametrize(
    "lens", [[131_071, 5, 0, 70_000], [1 + b * 977 % 2500 for b in range(33)]], ids=["uneven", "batch"]
)
def test_long_and_many_sequences_meet_the_error_rule(lens: list[int], splits: int, device: torch.device) -> None:
    check(decode(lens, device=device, splits=splits, kv_heads=8))


@pytest.mark.gpu
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 8), (3, 2), (40, 1), (300, 1)])
def test_any_number_of_key_heads_meets_the_error_rule(kv_heads: int, group: int, device: torch.device) -> None:
    """Blocks are shared out among heads: more heads than blocks, and numbers that do not divide."""
    check(decode([700, 3, 64], device=device, kv_heads=kv_heads, group=group, dim=64))


@pytest.mark.gpu
def test_more_sequences_than_a_warp_plans_meet_the_error_rule(device: torch.device) -> None:
    check(decode([1 + b * 7 % 300 for b in range(700)], device=device, dim=64))


@pytest.mark.gpu
def test_a_batch_of_empty_sequences_is_zero(device: torch.device) -> None:
    args = decode([0, 0, 0], device=device)
    out, lse = run(args)
    assert not out.any()
    assert bool((lse == -torch.inf).all())


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 2, 3, 7])
@pytest.mark.parametrize("tma", [False, True])
def test_what_is_not_finite_is_seen_whatever_the_number_of_splits(tma: bool, splits: int, cuda: torch.device) -> None:
    """Of three requests: scores that are NaN, a NaN among the last values, an Inf among the last values."""
    from attention_backend.kernels import flash_decode

    args = decode([500, 500, 500], device=cuda, kv_heads=1, splits=splits)
    args.q[0] = torch.nan
    assert args.block_table is not None
    for request, value in ((1, torch.nan), (2, torch.inf)):
        args.v[args.block_table[request, 499 // 64], 499 % 64, 0, :8] = value
    with poisoned_memory():
        out, _ = flash_decode.forward(args, tma=tma)
    assert out[0].isnan().all()
    assert out[1, ..., :8].isnan().all()
    assert out[2, ..., :8].isinf().all()
    assert out[1:, ..., 8:].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dim", "rows", "kernel"),
    [(128, 4, "flash_decode"), (128, 5, "flash_fwd_sm90"), (64, 4, "flash_decode"), (64, 16, "flash_fwd_sm90")],
)
def test_more_rows_than_a_tile_of_decodes_go_to_the_forward(
    dim: int, rows: int, kernel: str, hopper: torch.device
) -> None:
    args = decode([1000, rows, 0, 129, 16_384], device=hopper, rows=rows, dim=dim)
    assert dispatch.select(args).kernel == kernel
    with poisoned_memory():
        check(args, dispatch.run(args))


@pytest.mark.gpu
def test_a_longer_table_than_needed_changes_nothing_but_rounding(device: torch.device) -> None:
    """The engine hands in the table of the longest possible sequence; unused entries are never followed."""
    args = decode([1000, 70], device=device)
    assert args.block_table is not None
    wide = torch.full((2, 4096), 2**31 - 1, dtype=torch.int32, device=device)
    wide[:, : args.block_table.shape[1]] = torch.where(args.block_table < 0, 2**31 - 1, args.block_table)
    check(replace(args, block_table=wide, max_seqlen_k=4096 * 64))


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("rows", [1, 3])
def test_small_decodes_meet_the_error_rule_on_cpu(rows: int, splits: int) -> None:
    check(decode([40, 0, 17, 1], device=CPU, rows=rows, splits=splits, group=5, page=16, dim=32))
