"""Kernels without a GPU: the tests that run on one, here on small problems and with threads in several orders.

`python -m tests.emulator` runs all of them, which takes hours.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import ModuleType

import pytest
import torch

from attention_backend import PagedMetadata, flash_attn_with_kvcache, fp8_pages, layers, paged_attention
from attention_backend.heuristics import sm90_backward
from attention_backend.heuristics.gated_linear import GatedConfig
from attention_backend.heuristics.sm90 import ALONE, BY_HEADS, BY_ROWS
from attention_backend.heuristics.sm90_backward import backward_tiles
from attention_backend.kernels import device, flash_bwd_sm90, flash_fwd_sm90, flash_merge, workspace
from attention_backend.problem import AttentionArgs
from benchmarks import backward_tiles as backward_tiles_benchmark
from benchmarks import forward_tiles
from benchmarks.attention_cells import Cell
from benchmarks.attention_inputs import Tensors
from benchmarks.attention_truth import Truth, acceptable
from tests.kernels import (
    backward_oracle,
    error_rule,
    test_chain_attention,
    test_extremes,
    test_forward_tiles,
    test_fp8_forward,
    test_fp8_prefill,
    test_gated_linear,
    test_kv_store,
    test_layer_chain,
    test_layers,
    test_levels,
    test_merge,
    test_rows_without_keys,
)
from tests.kernels.problems import Case, build

from .device import Settings, emulated_device
from .memory import guarded

CPU = torch.device("cpu")
BF16, FP16 = torch.bfloat16, torch.float16
AMPERE, HOPPER = Settings((8, 0)), Settings((9, 0))
#: An odd number of tiles of rows; a cluster with several pairs of them; one block of two without rows. Pairs of heads:
#: rows that see nothing; tiles of one step, which are drawn fast; pages.
CLUSTERS = (
    (BY_ROWS, 128, Case(300, 330, batch=2, heads=2, kv_heads=1, mask="full")),
    (BY_ROWS, 128, Case(800, 150, heads=6, kv_heads=3, mask="full", dtype="fp16")),
    (BY_ROWS, 256, Case(100, 200, batch=2, heads=2, kv_heads=2, mask="full", sinks=True)),
    (BY_ROWS, 128, Case(700, 600, heads=2, kv_heads=2)),
    (BY_ROWS, 256, Case(300, 350, heads=2, kv_heads=2, layout="varlen", mask="chunk")),
    (BY_ROWS, 128, Case(200, 330, batch=3, heads=3, kv_heads=3, layout="paged_varlen", page=32)),
    (BY_HEADS, 128, Case(600, 400, heads=4, kv_heads=2)),
    (BY_HEADS, 128, Case(500, 90, batch=2, heads=8, kv_heads=2, mask="full", dtype="fp16")),
    (BY_HEADS, 128, Case(200, 330, batch=3, heads=4, kv_heads=2, layout="paged_varlen", page=32)),
    (BY_HEADS, 256, Case(300, 350, heads=2, kv_heads=1, layout="varlen", mask="sliding")),
)
SMALL = Case(70, 150, batch=2, heads=4, kv_heads=2)


@contextmanager
def left_at_zero(settings: Settings) -> Iterator[None]:
    """A device whose kernels leave their counters at zero."""
    with emulated_device(settings):
        yield
        assert not workspace.counters(CPU, 1).any()


def test_layers_around_attention() -> None:
    with emulated_device(HOPPER):
        test_layers.test_rms_norm(576, BF16, True, CPU)
        test_layers.test_rotary_and_store_are_bitwise_plain_torchs((5, 5), 80, 32, BF16, True, CPU)
        test_layers.test_heads_norms_before_rotary((9, 3), 64, 64, False, CPU)
        test_kv_store.check_store(70, 48, (80, 64), BF16, CPU, packed=True)
        test_merge.test_states_of_every_head_dim_merge(9, 64, "fp16", CPU)


@pytest.mark.parametrize("capability", [(7, 5), (8, 9)])
def test_float32_where_shared_memory_is_small(capability: tuple[int, int]) -> None:
    """Wide heads have smaller tiles there. A softcap of Gemma 2 is exact as well."""
    case = Case(37, 90, batch=2, dim=256, dim_v=256, score="softcap", dtype="fp32")
    with emulated_device(HOPPER._replace(capability=capability)):
        error_rule.check(replace(build(case, CPU), softcap=50.0))


def test_scales_may_have_any_strides() -> None:
    """Kernels read them as arrays."""
    dense = torch.tensor([0.5, 0.25])
    for scale in (dense, torch.tensor([0.5, 9.0, 0.25, 9.0])[::2]):
        assert float8_step(scale) == float8_step(dense)
    assert float8_step(torch.tensor([0.5]).expand(2)) == float8_step(torch.tensor([0.5, 0.5]))
    assert float8_step(torch.tensor([0.5]).expand(2)) != float8_step(dense)


def float8_step(scale: torch.Tensor) -> list[list[float]]:
    """What rotary_store, flash_attn_with_kvcache and two steps of paged_attention store and compute with it."""
    torch.manual_seed(0)
    heads, page, dim, rows = len(scale), 16, 32, 2
    q, k = torch.randn(rows, 2 * heads, dim).to(BF16), torch.randn(rows, heads, dim).to(BF16)
    pages = torch.randn(2, heads, page, dim).to(torch.float8_e4m3fn)
    lens, table = torch.tensor([20], dtype=torch.int32), torch.tensor([[1, 0]], dtype=torch.int32)
    scales = {"k_scale": guarded(scale), "v_scale": guarded(scale)}
    results = []
    with emulated_device(HOPPER):
        q, k, pages, lens, table = map(guarded, (q, k, pages, lens, table))
        stored = guarded(pages)
        tables = (guarded(torch.ones(rows, dim // 2)), guarded(torch.zeros(rows, dim // 2)))
        results += [
            layers.rotary_store(q, k, k, stored, guarded(stored), torch.arange(rows), *tables, **scales),
            stored,
        ]
        cache = guarded(pages).transpose(1, 2)
        options = {"cache_seqlens": lens, "block_table": table, "causal": True, **scales}
        results += [flash_attn_with_kvcache(q[None], cache, guarded(cache), k[None], k[None], **options), cache]
        for new in (1, rows):
            ends = guarded(torch.tensor([0, new], dtype=torch.int32))
            step = PagedMetadata(ends, lens, table, torch.full((new,), -1), int(new == 1), new, 32)
            results.append(paged_attention(q[:new], None, None, pages, pages, step, softmax_scale=0.2, **scales))
    return [x.float().flatten().tolist() for x in results]


@pytest.mark.parametrize("config", [GatedConfig(cluster=2, outputs=112), GatedConfig(cluster=1)], ids=str)
def test_gates_of_many_rows(config: GatedConfig) -> None:
    """Slabs of columns that overlap; blocks that share weights, and one alone."""
    with emulated_device(HOPPER):
        test_gated_linear.check(config, BF16, (300, 200, 264), 2, CPU)


@pytest.mark.parametrize("num_sms", [*(pytest.param(sms, marks=pytest.mark.thorough) for sms in (1, 7)), 3])
def test_a_chain_of_layers_exchanges_words(num_sms: int) -> None:
    for seed in range(3):
        with left_at_zero(Settings(num_sms=num_sms, seed=seed)):
            for rows, sizes in ((1, (256, 136, 264, 72)), (2, (520, 1032, 8, 8)), (3, (136, 520, 1032, 41))):
                test_layer_chain.test_errors_are_those_of_plain_torch(sizes, BF16, rows, CPU)


def test_a_chain_of_layers_ends_in_pages() -> None:
    with left_at_zero(Settings(num_sms=5)):
        test_layer_chain.check_products_in_pages(5, 1, 80, 16, (264, 520), CPU, fp8=True)


@pytest.mark.parametrize(("lengths", "num_sms"), [((16, 17), 5), ((200,), 7)])
def test_a_chain_begins_with_its_attention(lengths: tuple[int, ...], num_sms: int) -> None:
    for seed in range(2):
        with left_at_zero(Settings(num_sms=num_sms, seed=seed)):
            front = test_chain_attention.Front(CPU, BF16, lengths, 6, 2, 64)
            for width in (264, 72):  # of which some blocks have no product first
                test_chain_attention.check(front, (width, 136, 72))


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        (replace(SMALL, layout="varlen", score="softcap", sinks=True), AMPERE),
        (replace(SMALL, sq=1, layout="paged", page=16, keys="leftpad"), AMPERE),
        (replace(SMALL, sq=2, sk=300, layout="paged"), HOPPER),
        (replace(SMALL, layout="varlen", mask="chunk"), HOPPER),
    ],
    ids=str,
)
def test_forward(case: Case, settings: Settings) -> None:
    for seed in range(2):
        with left_at_zero(settings._replace(seed=seed)):
            error_rule.check(build(case, CPU))


@pytest.mark.parametrize("cluster", [ALONE, BY_ROWS, BY_HEADS])
@pytest.mark.parametrize(
    "case",
    [
        Case(430, 330, batch=2, heads=2, kv_heads=1, mask="full"),
        Case(200, 400, batch=3, heads=4, kv_heads=2, layout="paged_varlen", page=32, dtype="fp16"),
    ],
    ids=str,
)
def test_tiles_of_192_rows(case: Case, cluster: str) -> None:
    for dim in (80, 96, 128) if cluster == ALONE else (128,):
        with left_at_zero(HOPPER._replace(seed=dim)):
            args = build(replace(case, dim=dim, dim_v=dim), CPU)
            check = partial(flash_fwd_sm90.forward, cluster=cluster, tall=True)
            error_rule.check(args, error_rule.run(args, check))


@pytest.mark.parametrize(("group", "tall", "splits"), [(3, False, 0), (4, True, 1), (4, True, 3)])
def test_pairs_of_packed_tiles(group: int, tall: bool, splits: int) -> None:
    """On few multiprocessors, so that a pair of blocks draws several pairs of tiles."""
    with left_at_zero(HOPPER._replace(seed=group, num_sms=6)):
        test_forward_tiles.test_pairs_of_packed_tiles(group, tall, splits, CPU)


@pytest.mark.parametrize("keys", ["key_mask", "bias_float", "bias_element"])
def test_tiles_of_192_rows_under_masks_and_biases(keys: str) -> None:
    with left_at_zero(HOPPER):
        args = build(Case(430, 330, heads=2, kv_heads=1, dim=128, dim_v=128, keys=keys), CPU)
        error_rule.check(args, error_rule.run(args, partial(flash_fwd_sm90.forward, tall=True)))


def test_rows_that_no_copy_writes_change_no_others() -> None:
    """Of seven heads 18 rows each fill 126 rows of a tile; what lies behind them is anything."""
    case = Case(18, 400, heads=7, kv_heads=1, mask="full", dtype="fp16", num_splits=1)
    args = test_levels.shaped(build(case, CPU), "rising by 2^60")
    q = args.q.clone().flatten(1, 2)
    q[:, 112:118] = q[:, 119:] = 0
    for seed in range(2):
        with left_at_zero(HOPPER._replace(seed=seed)):
            zeros = replace(args, q=q.view_as(args.q))
            error_rule.check(zeros, error_rule.run(zeros, flash_fwd_sm90.forward))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_warpgroups_that_leave_out_keys_of_their_own(dim: int) -> None:
    case = Case(200, 330, batch=2, heads=2, kv_heads=1, dim=dim, dim_v=dim, layout="varlen")
    for seed in range(3):
        with left_at_zero(HOPPER._replace(seed=seed)):
            args = build(case, CPU)
            error_rule.check(args, error_rule.run(args, partial(flash_fwd_sm90.forward, own=True)))


@pytest.mark.parametrize(
    ("cluster", "dim", "case"),
    [pytest.param(*each, marks=pytest.mark.thorough) if each[2].dtype == "fp16" else each for each in CLUSTERS],
    ids=str,
)
def test_blocks_that_load_keys_for_each_other(cluster: str, dim: int, case: Case) -> None:
    for seed in range(3):
        with left_at_zero(HOPPER._replace(seed=seed)):
            args = build(replace(case, dim=dim, dim_v=dim), CPU)
            error_rule.check(args, error_rule.run(args, partial(flash_fwd_sm90.forward, cluster=cluster)))


def merged_parts(args: AttentionArgs) -> tuple[torch.Tensor, torch.Tensor]:
    parts, lses = flash_fwd_sm90.forward_partials(args)
    assert parts.shape[0] > 1
    assert (lses[1:] > -torch.inf).any(), "the device chose one part"
    out, lse = args.q.new_empty(args.out_shape), args.q.new_empty(args.lse_shape, dtype=torch.float32)
    flash_merge.merge(parts, lses, out, lse)
    return out, lse


@pytest.mark.parametrize(("batch", "layout"), [(3, "paged_varlen"), (1, "paged_varlen"), (1, "paged")])
def test_the_device_chooses_how_many_parts_of_keys_there_are(batch: int, layout: str) -> None:
    """As many as suit the sequences that there are, or the one; there may be room for more."""
    case = Case(40, 1100, batch=batch, heads=2, kv_heads=1, dim=64, dim_v=64, layout=layout, page=64)
    for seed in range(2):
        with left_at_zero(HOPPER._replace(num_sms=12, seed=seed)):
            args = build(case, CPU)
            error_rule.check(args, error_rule.run(args, merged_parts))


@pytest.mark.parametrize("beside", [(), pytest.param((5,), marks=pytest.mark.thorough), (40, 5)], ids=str)
def test_few_short_sequences_change_no_number_of_parts(beside: tuple[int, ...]) -> None:
    """Padding of a CUDA graph, chats beside a long prompt. 64 rows of two groups of four are four long tiles: eight
    multiprocessors have two parts of each. As many parts as for six would be four of each, in two rounds."""
    keys = (4096, *(64 for _ in beside))
    with left_at_zero(HOPPER._replace(num_sms=8)):
        case = Case(64, 4096, batch=len(keys), heads=8, kv_heads=2, layout="paged_varlen", page=64)
        args = build(replace(case, q_lens=(64, *beside), k_lens=keys), CPU)
        _, lses = flash_fwd_sm90.forward_partials(args)
        assert (lses[:, :, :64] > -torch.inf).sum(0).unique().tolist() == [2]
        error_rule.check(args, error_rule.run(args, merged_parts))


@pytest.mark.parametrize(
    ("num_sms", "tall"), [pytest.param(8, False, marks=pytest.mark.thorough), (9, False), (8, True)]
)
def test_the_device_chooses_parts_for_pairs_of_blocks(num_sms: int, tall: bool) -> None:
    """96 rows of two groups of four are two long pairs of tiles of 192 rows, 64 of 128: four pairs of blocks have two
    parts of each. As many parts as for eight blocks alone would be four of each, in two rounds."""
    rows = 96 if tall else 64
    with left_at_zero(HOPPER._replace(num_sms=num_sms)):
        case = Case(rows, 4096, batch=2, heads=8, kv_heads=2, dim=128, dim_v=128, layout="paged_varlen", page=32)
        args = build(replace(case, q_lens=(rows, 5), k_lens=(4096, 64)), CPU)
        which, plan = flash_fwd_sm90._plan(args, False, 0, cluster=BY_ROWS, tall=tall, pack=True)
        assert plan.chosen
        _, lses = flash_fwd_sm90._partials(args, which, plan)
        assert (lses[:, :, :rows] > -torch.inf).sum(0).unique().tolist() == [2]
        forward = partial(flash_fwd_sm90.forward, cluster=BY_ROWS, tall=tall, pack=True)
        error_rule.check(args, error_rule.run(args, forward))


@pytest.mark.parametrize("bench", [forward_tiles, backward_tiles_benchmark], ids=lambda bench: bench.SECTION)
def test_the_benchmark_of_tiles_runs_each_on_the_cells_inputs(bench: ModuleType) -> None:
    cell = Cell(bench.SECTION, 1, 140, 140, 2, 2, 64, True)
    with left_at_zero(HOPPER):
        tensors = Tensors.random(cell, CPU)
        truth = Truth.of(cell, tensors)
        for contender in bench.contenders_of(64, None):
            call = contender.makes[cell.section](cell, tensors)
            assert acceptable(cell, truth.error(call())), contender.name


@pytest.mark.parametrize(("num_sms", "rows", "keys", "causal"), [(3, 300, 350, True), (13, 70, 2600, False)])
@pytest.mark.parametrize("dim", [pytest.param(64, marks=pytest.mark.thorough), 128, 256])
def test_forward_at_8_bits(dim: int, num_sms: int, rows: int, keys: int, causal: bool) -> None:
    """Blocks take tile after tile; the tiles of a round that would leave SMs idle are cut into parts of their keys."""
    for seed in range(2):
        with left_at_zero(HOPPER._replace(num_sms=num_sms, seed=seed)):
            x = test_fp8_forward.problem("emulated", rows, keys, dim, heads=(2, 1), device=CPU)
            test_fp8_forward.check(x, causal=causal, attend=test_fp8_forward.kernels)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_forward_at_8_bits_of_rows_that_see_nothing(dim: int) -> None:
    with left_at_zero(HOPPER):
        test_fp8_forward.check_rows_that_see_nothing(dim, CPU)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_forward_at_8_bits_of_negative_scores(dim: int) -> None:
    with left_at_zero(HOPPER):
        x = test_fp8_forward.negative_and_rising(dim, CPU)
        test_fp8_forward.check(x, causal=False, limit=0.4, attend=test_fp8_forward.kernels)


@pytest.mark.parametrize("dims", [(128, 128), (80, 48)], ids=str)
def test_forward_over_float8_pages(dims: tuple[int, int]) -> None:
    case = replace(test_fp8_prefill.SMALL, dim=dims[0], dim_v=dims[1], sinks=True)
    for seed in range(3):
        with left_at_zero(HOPPER._replace(seed=seed)):
            test_fp8_prefill.check(test_fp8_prefill.problem(case, CPU))


@pytest.mark.parametrize("settings", [HOPPER, Settings((8, 9)), Settings((12, 0))], ids=str)
def test_rows_over_float8_pages_have_a_kernel(settings: Settings) -> None:
    """On Hopper few rows are not worth a copy; what is refused is copied."""
    small = replace(test_fp8_prefill.SMALL, batch=1, layout="paged")
    copied = f"dequantize_pages + flash_fwd_sm{90 if settings == HOPPER else 80}"
    few = "flash_fwd_sm90" if settings == HOPPER else copied
    with left_at_zero(settings):
        for case, kernel in (
            (replace(small, sq=1), "flash_decode"),
            (replace(small, sq=1024), few),
            (replace(small, sq=1025), copied),
            (replace(small, dim=256, dim_v=256), copied),
            (replace(small, score="softcap"), copied),
            (replace(small, score="alibi"), copied),
            (replace(small, page=24), "dequantize_pages + flash_fwd_sm80"),
        ):
            assert fp8_pages.kernel(test_fp8_prefill.problem(case, CPU)) == kernel


@pytest.mark.parametrize("settings", [AMPERE, HOPPER], ids=str)
def test_descriptors(settings: Settings) -> None:
    with left_at_zero(settings):
        for rows in (1, 70):
            test_extremes.check_descriptors(rows, CPU)


def test_rows_that_see_no_key() -> None:
    with left_at_zero(HOPPER):
        case = Case(300, 300, batch=5, heads=2, kv_heads=1)
        error_rule.check(test_rows_without_keys.padded(case, CPU))
        error_rule.check(build(Case(300, 60, batch=2, heads=2, kv_heads=1, layout="paged_varlen"), CPU))


@pytest.mark.parametrize("settings", [AMPERE, HOPPER], ids=str)
def test_backward(settings: Settings) -> None:
    with left_at_zero(settings):
        args = build(replace(SMALL, layout="varlen", mask="sliding"), CPU)
        for kernel in backward_oracle.kernels_for(args):
            backward_oracle.check(args, kernel, with_lse=True)


@pytest.mark.parametrize("dim", [pytest.param(128, marks=pytest.mark.thorough), 256])
def test_generic_backward_in_two_halves(dim: int) -> None:
    """Weights that are the probabilities, and weights of their own."""
    cases = (
        build(Case(130, 150, heads=2, kv_heads=1, dim=dim, dim_v=dim, mask="sliding"), CPU),
        replace(
            build(Case(70, 130, batch=2, heads=2, kv_heads=2, dim=dim, dim_v=dim, score="softcap"), CPU),
            dropout_p=0.3,
            dropout_seed=torch.tensor([5, 6]),
        ),
    )
    for args in cases:
        with left_at_zero(HOPPER):
            backward_oracle.check(args, "flash_bwd_sm80", with_lse=True)


@pytest.mark.parametrize(("dim", "dim_v"), [pytest.param(192, 128, marks=pytest.mark.thorough), (256, 256)])
def test_backward_of_wide_heads_by_pairs_of_blocks(dim: int, dim_v: int) -> None:
    """One to six steps of rows a tile of keys; keys that no row sees."""
    for seed, case in enumerate(
        (Case(250, 300, kv_heads=1, mask="sliding"), Case(60, 130), Case(180, 130, mask="full"))
    ):
        args = build(replace(case, batch=1, heads=2, dim=dim, dim_v=dim_v), CPU)
        with left_at_zero(HOPPER._replace(seed=seed)):
            backward_oracle.check(args, "flash_bwd_sm90", with_lse=True)


@pytest.mark.parametrize("dim", [64, 96, 128])
def test_backward_tiles_that_are_not_the_default(dim: int) -> None:
    args = build(Case(330, 200, batch=1, heads=2, kv_heads=1, dim=dim, dim_v=dim, layout="varlen"), CPU)
    for tile in backward_tiles(dim, dim)[1:]:
        with left_at_zero(HOPPER):
            backward_oracle.check(args, "flash_bwd_sm90", with_lse=True, tile=tile)


@pytest.mark.parametrize("dim", [64, pytest.param(128, marks=pytest.mark.thorough)])
def test_dq_that_is_finished_on_the_way_waits_for_no_block_that_does_not_run(
    dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four blocks are launched where two run at a time."""
    monkeypatch.setattr(sm90_backward, "_SECTION_BYTES", 1)
    monkeypatch.setattr(device, "num_sms", lambda _: 4)
    later: list[bool] = []

    def held(units: int, section: int) -> tuple[int, int]:
        units_held, lag = sm90_backward.held_units(units, section)
        later.append(lag < units)
        return units_held, lag

    monkeypatch.setattr(flash_bwd_sm90, "held_units", held)
    for length in (200, 400):
        args = build(Case(100, length, batch=4, heads=2, kv_heads=2, dim=dim, dim_v=dim), CPU)
        for seed in range(2):
            with left_at_zero(HOPPER._replace(num_sms=1, seed=seed)):
                backward_oracle.check(args, "flash_bwd_sm90")
    assert later
    assert all(later)


@pytest.mark.parametrize(
    "case",
    [replace(SMALL, sk=100, batch=1, heads=8, kv_heads=1), replace(SMALL, sk=400, batch=1, dtype="fp16")],
    ids=["one key head, whose group's parts a kernel sums", "tiles of keys that add in turns"],
)
def test_deterministic_backward(case: Case) -> None:
    args = replace(build(case, CPU), deterministic=True)
    gradients = [_hopper_gradients(args, seed) for seed in range(8)]
    for other in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], other, strict=True))


def _hopper_gradients(args: AttentionArgs, seed: int) -> tuple[torch.Tensor, ...]:
    from attention_backend import backward, dispatch

    with left_at_zero(HOPPER._replace(seed=seed)):
        if seed == 0:
            backward_oracle.check(args, "flash_bwd_sm90")
        out, lse = dispatch.run(args)
        result = backward.run(args, out, lse, torch.ones_like(out), None, kernel="flash_bwd_sm90")
    return result.dq, result.dk, result.dv


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("profile", test_levels.PROFILES)
def test_levels_that_follow_scores(profile: str, dtype: str) -> None:
    for dim, mask in ((64, "causal"), (128, "full"), (256, "causal")):
        with left_at_zero(HOPPER):
            case = replace(test_levels.CASE, dim=dim, dim_v=dim, dtype=dtype, mask=mask)
            args = test_levels.shaped(build(case, CPU), profile)
            error_rule.check(args, error_rule.run(args, flash_fwd_sm90.forward))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_rows_do_not_depend_on_their_warp(dim: int) -> None:
    for dtype in ("bf16", "fp16"):
        with left_at_zero(HOPPER):
            test_levels.check_rows_of_their_own(dim, dtype, CPU)
            test_levels.check_rows_beside_nan(dim, dtype, CPU)


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        (HOPPER, "fp16"), (AMPERE, "fp32"),
        pytest.param(AMPERE, "bf16", marks=pytest.mark.thorough),
        pytest.param(AMPERE, "fp16", marks=pytest.mark.thorough),
        pytest.param(HOPPER, "bf16", marks=pytest.mark.thorough),
        pytest.param(HOPPER, "fp32", marks=pytest.mark.thorough),
    ],
    ids=str,
)  # fmt: skip
def test_rows_of_nan(settings: Settings, dtype: str) -> None:
    with left_at_zero(settings):
        for case in test_extremes.NAN_CASES:
            test_extremes.check_rows_of_nan(replace(case, dtype=dtype), CPU)
