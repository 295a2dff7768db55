"""Which kernels are compiled before steps meet them."""

from itertools import product

import pytest
import torch

from attention_backend.heuristics.sm90 import CLUSTER
from attention_backend.heuristics.sm90_chunks import PAIRS_KEYS
from attention_backend.jit import ARCHS
from attention_backend.kernels import device, flash_fwd_sm90, layer_chain
from attention_backend.kernels.chain_store import Store
from attention_backend.kernels.covering import covering_set
from attention_backend.kernels.hopper_variants import hopper_variant
from attention_backend.kernels.step_kernels import step_variants
from attention_backend.layer_chain import MOST_ROWS, ChainHeads
from attention_backend.preparation import (
    ChainStep,
    LayerStep,
    StepLayer,
    chain_kernels,
    layer_kernels,
    make_ready,
    step_kernels,
)
from attention_backend.problem import AttentionArgs


def test_llamas_kernels_on_hopper_are_forwards_decodes_and_a_merge() -> None:
    found = list(dict.fromkeys(step_variants("sm_90a", torch.bfloat16, 128, 128, group=4, page_size=64)))
    names = [variant.kernel for variant in found]
    # Of few keys, many keys, many rows; pairs of heads of the latter two. All with bounds on the left and without.
    assert names.count("flash_fwd_sm90") == 2 * 14
    assert names.count("flash_decode_sm90") == 2  # 8 and 16 query rows at once; forwards take more
    assert names.count("flash_merge") == 1
    assert len(found) == 31
    short = set(step_variants("sm_90a", torch.bfloat16, 128, 128, group=4, page_size=64, most_keys=4096))
    assert [variant.kernel for variant in short].count("flash_fwd_sm90") == 2 * 8
    ahead = set(covering_set("sm_90a"))
    assert sum(variant in ahead for variant in found) >= 5, "most are in the images' covering set, too"


def test_over_float8_pages_there_are_forwards_that_read_them_and_forwards_of_copies() -> None:
    def forwards(head_dim: int, *, softcap: bool = False) -> list[int]:
        found = set(
            step_variants(
                "sm_90a", torch.bfloat16, head_dim, head_dim, group=4, page_size=64, softcap=softcap, fp8_kv=True
            )
        )
        return [sum(("FP8_PAGES", flag) in variant.defines for variant in found) for flag in (1, 0)]

    assert forwards(128) == [2 * 4, 2 * 14]
    assert forwards(64) == [2 * 4, 2 * 8]
    assert (forwards(256), forwards(128, softcap=True)) == ([0, 2 * 5], [0, 2 * 4])


@pytest.mark.parametrize(("group", "most_keys", "kinds"), [(4, 8192, 4), (3, 8192, 0), (1, 16384, 4), (4, 8191, 0)])
def test_blocks_that_load_keys_for_each_other_are_ready_where_they_will_be_wanted(
    group: int, most_keys: int, kinds: int
) -> None:
    found = set(step_variants("sm_90a", torch.bfloat16, 128, 128, group=group, page_size=32, most_keys=most_keys))
    assert sum(("CLUSTER", CLUSTER) in variant.defines for variant in found) == kinds
    by_heads = ("CLUSTER_HEADS", int(group % CLUSTER == 0))
    assert all(by_heads in variant.defines for variant in found if ("CLUSTER", CLUSTER) in variant.defines)


@pytest.mark.parametrize("group", [2, 3, 4, 7, 16])
@pytest.mark.parametrize(("width", "heights"), [(128, (128, 192)), (256, (128,)), (64, ())])
def test_pairs_of_packed_tiles_are_ready_where_chunks_may_see_so_many_keys(
    width: int, heights: tuple[int, ...], group: int
) -> None:
    """Whole or in parts, of 128 rows and 192; not with bounds on the left. Also where tiles that are not packed are no
    pairs over so few keys, as of odd groups at head_dim 256."""
    found = set(step_variants("sm_90a", torch.bfloat16, width, width, group=group, page_size=32, most_keys=PAIRS_KEYS))
    paired = [dict(each.defines) for each in found if {("CLUSTER", CLUSTER), ("PACK", 1)} <= set(each.defines)]
    assert sorted((each["BLOCK_M"], each["SPLIT"]) for each in paired) == list(product(heights, (0, 1)))
    assert not any(each["LEFT_BOUNDS"] or each["CLUSTER_HEADS"] for each in paired)
    ahead = [dict(each.defines) for each in covering_set("sm_90a") if each.kernel == "flash_fwd_sm90"]
    assert all(each in ahead for each in paired), "none is first compiled where it is wanted"


def test_layers_with_windows_have_kernels_with_bounds_on_the_left_alone() -> None:
    def bounds(**layer: bool) -> set[int]:
        found = step_variants("sm_90a", torch.bfloat16, 128, 128, group=4, page_size=64, **layer)
        return {dict(variant.defines)["LEFT_BOUNDS"] for variant in found if variant.kernel == "flash_fwd_sm90"}

    assert (bounds(left_bounds=True), bounds()) == ({1}, {0, 1})


@pytest.mark.parametrize(
    ("requests", "rows", "keys", "partial"),
    [
        *((1, rows, 32768, True) for rows in (128, 256, 512, 1024, 2048, 8192)),
        *((n, 512, 32768, False) for n in (4, 16)),
        (4, 2048, 32768, False),  # by pairs of blocks
    ],
)
def test_passes_over_shared_keys_and_behind_them_find_their_kernels_ready(
    requests: int, rows: int, keys: int, partial: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "num_sms", lambda _index: 132)
    meta = {"device": "meta"}
    cache = torch.empty(8, 64, 8, 128, dtype=torch.bfloat16, **meta)
    each, bounds = (
        torch.empty(requests, dtype=torch.int32, **meta),
        torch.empty(requests + 1, dtype=torch.int32, **meta),
    )
    args = AttentionArgs(
        torch.empty(requests * rows, 32, 128, dtype=torch.bfloat16, **meta),
        cache,
        cache,
        0.1,
        cu_seqlens_q=bounds,
        max_seqlen_q=rows,
        max_seqlen_k=keys,
        seqused_k=each,
        leftpad_k=each,
        block_table=torch.empty(requests, keys // 64, dtype=torch.int32, **meta),
        window_right=-1 if partial else 0,
    )
    which, plan = flash_fwd_sm90._plan(args, False, 0, False if partial else None, partial=partial)
    wanted = hopper_variant(which, pack=plan.pack, split=partial or plan.num_splits > 1)
    assert ("LEFT_BOUNDS", 1) in wanted.defines
    assert wanted in set(step_variants("sm_90a", torch.bfloat16, 128, 128, group=4, page_size=64, most_keys=keys))


def test_without_groups_nothing_is_packed() -> None:
    found = set(step_variants("sm_90a", torch.bfloat16, 64, 64, group=1, page_size=64))
    assert not any(("PACK", 1) in variant.defines for variant in found)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_every_architecture_has_kernels_for_steps(arch: str, head_dim: int, head_dim_v: int, page_size: int) -> None:
    dtype = torch.float16 if arch == "sm_75" else torch.bfloat16
    found = set(step_variants(arch, dtype, head_dim, head_dim_v, group=8, page_size=page_size, softcap=True))
    kernels = {variant.kernel for variant in found}
    assert ("flash_fwd_sm90" in kernels) == (arch == "sm_90a")
    assert any("decode" in name for name in kernels)
    assert all(variant.arch == arch for variant in found)


def test_a_cpu_has_nothing_to_prepare() -> None:
    layers = [StepLayer(128, 128, 4, softcap=False)]
    cpu = torch.device("cpu")
    assert step_kernels(layers, torch.bfloat16, cpu, page_size=64, most_keys=8192) == []
    assert layer_kernels([LayerStep(64, 16, False, False, "silu")], torch.bfloat16, cpu) == []
    assert make_ready([], cpu) == 0


def test_a_chain_has_a_kernel_for_each_number_of_rows() -> None:
    """Llama-3.1-8B's rows leave rings of four sizes; a layer of 4 rows that are too wide has none."""

    def warps(width: int, gated_width: int) -> list[int]:
        found = layer_chain.variants_of(
            torch.bfloat16, "silu", width, width, gated_width, unit_offset=False, store=Store.PAGES
        )
        return [dict(variant.defines)["WARPS"] for variant in found]

    assert len(warps(4096, 14336)) == MOST_ROWS
    assert len(set(warps(4096, 14336))) == MOST_ROWS
    assert set(warps(576, 1536)) == {11}
    assert len(warps(8192, 28672)) < MOST_ROWS


def test_chains_that_share_a_kernel_are_prepared_once() -> None:
    def prepared(chains: list[ChainStep], *, fp8_kv: bool = False) -> int:
        return make_ready(chain_kernels(chains, torch.bfloat16, fp8_kv=fp8_kv), torch.device("cpu"))

    chain = ChainStep(512, 512, 1024, "silu", unit_offset=False, to_pages=True, heads=None)
    assert prepared([]) == 0
    assert prepared([chain, chain]) == 1
    assert prepared([chain, chain._replace(to_pages=False)]) == 2
    attending = chain._replace(heads=ChainHeads(4, 2, 128))
    assert prepared([attending]) == 2  # any number of keys, and few
    assert prepared([attending], fp8_kv=True) == 1
    assert prepared([chain._replace(heads=ChainHeads(4, 2, 80))]) == 1


def test_kernels_around_attention_are_those_of_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "arch", lambda _: "sm_90a")
    llama = LayerStep(4096, 128, unit_offset=False, normed_heads=False, activation="silu")
    gemma = LayerStep(2304, 256, unit_offset=True, normed_heads=True, activation="gelu_tanh")
    unknown = llama._replace(activation=None)  # stays a module

    def found(*layers: LayerStep, fp8_kv: bool = False) -> list[tuple[str, dict[str, str | int]]]:
        variants = layer_kernels(layers, torch.float16, torch.device("cuda"), fp8_kv=fp8_kv)
        assert all(variant.arch == "sm_90a" for variant in variants)
        return [(variant.kernel, dict(variant.defines)) for variant in variants]

    assert [name for name, _ in found(llama, llama)] == ["rms_norm", "rms_norm", "rotary_store", "gated_activation"]
    assert [name for name, _ in found(unknown)] == ["rms_norm", "rms_norm", "rotary_store"]
    assert len(found(llama, gemma)) == 8
    of_llama, of_gemma = dict(found(llama, fp8_kv=True)), dict(found(gemma))
    assert (of_llama["rotary_store"]["NORM"], of_llama["rotary_store"]["FP8_KV"]) == (0, 1)
    assert (of_gemma["rotary_store"]["NORM"], of_gemma["rotary_store"]["FP8_KV"]) == (2, 0)
    assert (of_llama["rms_norm"]["UNIT_OFFSET"], of_gemma["rms_norm"]["UNIT_OFFSET"]) == (0, 1)
    assert sorted(defines["ADD"] for name, defines in found(llama) if name == "rms_norm") == [0, 1]


@pytest.mark.gpu
def test_what_no_kernel_serves_is_left_to_dispatch() -> None:
    cuda_device = torch.device("cuda:0")
    served, odd = StepLayer(64, 64, 4, softcap=False), StepLayer(60, 60, 4, softcap=False)
    wide = StepLayer(512, 512, 1, softcap=False)
    choices = 2  # of tokens, for logits in float16 and in float32
    assert len(step_kernels([odd, wide], torch.float16, cuda_device, page_size=64, most_keys=8192)) == choices
    assert len(step_kernels([served, odd], torch.float16, cuda_device, page_size=64, most_keys=8192)) > choices
