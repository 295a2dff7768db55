"""Shared runs become groups that cover every row once, whatever shape a graph wants them in."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import random_model, tiny_config

from attention_backend.heuristics.prefix import least_saved_keys
from attention_backend.metadata import SharedPages
from models.attention_sites import AttentionSite, find_attention_sites
from models.batch import ScheduledSeq, StepBatch
from models.forward import PagedForward
from models.inputs import StepInputs, StepTensors
from models.kv_pool import allocate
from models.prefix_groups import GroupArrays, group_arrays, shared_pages, sharing_limits
from models.shared_runs import Levels, SharedRun, SharingLimits, StepSharing

BLOCK = 16
ONE = ((SharedRun(0, 3, 0, 2),),)
NESTED = ((SharedRun(0, 4, 0, 1), SharedRun(5, 7, 0, 3)), (SharedRun(1, 3, 1, 2), SharedRun(5, 7, 3, 4)))


def keys_of(arrays: GroupArrays, rows: list[int]) -> list[list[tuple[int, int, int]]]:
    """Per sequence, its (leader, first key, end) in every level with any; checks that rows are covered once."""
    bounds = np.concatenate(([0], np.cumsum(rows)))
    found: list[list[tuple[int, int, int]]] = [[] for _ in rows]
    for leaders, starts, lens, cu_rows in arrays.groups:
        assert cu_rows[0] == 0
        assert cu_rows[-1] == bounds[-1]
        assert (np.diff(cu_rows) >= 0).all()
        assert (np.diff(cu_rows) <= arrays.max_rows).all()
        for g, (first, end) in enumerate(pairwise(cu_rows)):
            members = [seq for seq in range(len(rows)) if first <= bounds[seq] < end]
            assert all(bounds[seq + 1] <= end for seq in members)
            for seq in members:
                if lens[g]:
                    found[seq].append((int(leaders[g]), int(starts[g]), int(lens[g])))
    return found


def test_runs_become_groups_and_the_rest_groups_of_nothing() -> None:
    arrays = group_arrays(NESTED, 8, block_size=BLOCK)
    assert keys_of(arrays, [1] * 8) == [
        [(0, 0, 16)],
        [(0, 0, 16), (1, 16, 32)],
        [(0, 0, 16), (1, 16, 32)],
        [(0, 0, 16)],
        [],
        [(5, 0, 48), (5, 48, 64)],
        [(5, 0, 48), (5, 48, 64)],
        [],
    ]
    assert arrays.own_starts.tolist() == [16, 32, 32, 16, 0, 64, 64, 0]
    assert arrays.max_rows == 4


def test_a_graph_gets_the_shape_it_was_captured_with() -> None:
    few, many = (
        group_arrays(levels, 8, block_size=BLOCK, num_levels=2, num_groups=8, max_rows=8) for levels in (ONE, NESTED)
    )
    assert few.groups.shape == many.groups.shape == (2, 4, 9)
    assert few.max_rows == many.max_rows == 8
    assert keys_of(few, [1] * 8) == [[(0, 0, 32)]] * 3 + [[]] * 5
    none = group_arrays((), 8, block_size=BLOCK, num_levels=1, num_groups=8, max_rows=8)
    assert keys_of(none, [1] * 8) == [[]] * 8
    assert not none.own_starts.any()


def test_large_groups_are_cut_where_a_kernel_takes_few_rows() -> None:
    arrays = group_arrays(((SharedRun(0, 7, 0, 2),),), (2, 1, 1, 3, 1, 1, 2, 1), block_size=BLOCK, max_rows=4)
    assert np.diff(arrays.groups[0, 3]).tolist() == [4, 4, 3, 1]
    assert arrays.groups[0, 0, :4].tolist() == [0, 3, 5, 7]
    assert arrays.own_starts.tolist() == [32] * 7 + [0]
    with pytest.raises(ValueError, match="3 query rows, more than a group's 2"):
        group_arrays(ONE, (3, 1, 1), block_size=BLOCK, max_rows=2)


def test_what_does_not_fit_a_graph_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit 1 levels"):
        group_arrays(NESTED, 8, block_size=BLOCK, num_levels=1, num_groups=8)
    with pytest.raises(ValueError, match="do not fit 2 levels of 3"):
        group_arrays(NESTED, 8, block_size=BLOCK, num_levels=2, num_groups=3)


def test_limits_follow_from_heads_and_from_what_kernels_read() -> None:
    def sites(heads: int, kv_heads: int, **changes: Any) -> list[AttentionSite]:
        site = AttentionSite(0, "full_attention", heads, kv_heads, 128, 128, 1.0, 0, 0, 0.0, False)
        return [replace(site, window=128), replace(site, **changes)]

    llama = sharing_limits(sites(32, 8), torch.bfloat16, 64, "cuda")
    assert llama == SharingLimits(least_saved_keys("cuda", 4096) // 64, 2, 32, 0)
    assert sharing_limits(sites(32, 8), torch.float8_e4m3fn, 64, "cuda") == SharingLimits(
        least_saved_keys("cuda", 2048) // 64, 2, 16, 16, prefills=False
    )
    mqa = sharing_limits(sites(71, 1), torch.bfloat16, 64, "cuda")
    assert mqa is not None
    assert mqa.tile_rows == 1
    assert sharing_limits(sites(71, 1), torch.float8_e4m3fn, 64, "cuda") is None  # its kernel takes 64 rows
    assert sharing_limits(sites(32, 8, window=4096), torch.bfloat16, 64, "cuda") is None


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_as_many_groups_as_sequences_are_always_enough(data: Any) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, 11), max_size=6)))
    bounds = list(pairwise([0, *cuts, 12]))
    runs = tuple(SharedRun(a, b, 0, data.draw(st.integers(1, 5))) for a, b in bounds if data.draw(st.booleans()))
    inner = tuple(
        SharedRun(run.first, data.draw(st.integers(run.first + 1, run.end)), run.stop, run.stop + 2) for run in runs
    )
    max_rows = data.draw(st.integers(1, 12))
    levels = (runs, inner) if data.draw(st.booleans()) else (runs,)
    arrays = group_arrays(levels, 12, block_size=BLOCK, num_levels=2, num_groups=12, max_rows=max_rows)
    ends = [max(end for *_, end in keys) if keys else 0 for keys in keys_of(arrays, [1] * 12)]
    assert ends == arrays.own_starts.tolist()
    covered = [sum(end - start for _, start, end in keys) for keys in keys_of(arrays, [1] * 12)]
    assert covered == ends


def with_sharing(step: StepTensors, sharing: StepSharing, rows: list[int]) -> StepTensors:
    """The step with shared pages, as the runner makes it."""
    meta, first = step.metadata, step.metadata.num_decodes
    parts: list[SharedPages | None] = []
    for levels, part in ((sharing.decodes, slice(0, first)), (sharing.prefills, slice(first, None))):
        arrays = group_arrays(levels, tuple(rows[part]), block_size=BLOCK)
        tensors = [torch.from_numpy(x.copy()) for x in (arrays.groups, arrays.own_starts)]
        pages = shared_pages(tensors[0], tensors[1], meta.block_table[part], arrays.max_rows)
        parts.append(pages if levels else None)
    return replace(step, metadata=replace(meta, shared_decodes=parts[0], shared_prefills=parts[1]))


LAYERS: list[dict[str, Any]] = [{}, {"num_key_value_heads": 4}]


@pytest.mark.parametrize("changes", LAYERS, ids=["gqa", "mha"])
def test_a_step_over_shared_pages_has_the_logits_of_the_plain_step(changes: dict[str, Any]) -> None:
    """Decodes that share in two levels, decodes that share nothing, and chunks that share: one step, both ways."""
    model = random_model(tiny_config(**changes))
    sites = find_attention_sites(model)
    caches = allocate(sites, 40, BLOCK, model.dtype, model.device)
    inputs = StepInputs(
        max_num_seqs=8, max_num_batched_tokens=300, max_blocks_per_seq=8, block_size=BLOCK, device=model.device
    )
    forward = PagedForward(model)
    table = [[1, 2, 3, 10], [1, 2, 3, 11], [1, 2, 12], [20, 21], [1, 2, 3, 30], [1, 2, 3, 31, 32]]
    lengths, new = [50, 61, 40, 30, 55, 70], [1, 1, 1, 1, 7, 20]
    generator = torch.Generator().manual_seed(5)
    document = torch.randint(3, 120, (48,), generator=generator).tolist()
    tokens = []
    for blocks, length in zip(table, lengths, strict=True):
        shared = sum(block < 10 for block in blocks) * BLOCK
        own = torch.randint(3, 120, (length - shared,), generator=generator).tolist()
        tokens.append([*document[:shared], *own])

    def run(starts: list[int], ends: list[int]) -> StepTensors:
        seqs = [
            ScheduledSeq(slot, tokens[slot][a:b], a, table[slot], True)
            for slot, (a, b) in enumerate(zip(starts, ends, strict=True))
        ]
        return inputs.build(StepBatch(tuple(seqs)))

    before = [length - count for length, count in zip(lengths, new, strict=True)]
    with torch.inference_mode():
        forward.every_row(run([0] * 6, before), caches)
        step = run(before, lengths)
        plain = forward.every_row(step, caches)
        decodes: Levels = ((SharedRun(0, 3, 0, 2),), (SharedRun(0, 2, 2, 3),))
        prefills: Levels = ((SharedRun(0, 2, 0, 3),),)
        for sharing in (StepSharing(decodes), StepSharing(prefills=prefills), StepSharing(decodes, prefills)):
            logits = forward.every_row(with_sharing(step, sharing, new), caches)
            assert not torch.equal(logits, plain)  # it did go another way
            torch.testing.assert_close(logits, plain, atol=2e-5, rtol=2e-5)
