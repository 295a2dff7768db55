"""Steps of the engine whose sequences share pages: paged_attention as a cascade, against the true attention."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attention_backend import dispatch, paged_attention
from attention_backend.metadata import PagedMetadata
from models.prefix_groups import group_arrays, shared_pages
from models.shared_runs import Levels, SharedRun

from .error_rule import check
from .problems import generator, randn
from .test_graphs import captured
from .test_paged_attention import Step, _lse_of, with_missing_decodes

PAGE = 64
DOCUMENT = 40  # pages that all sequences could share


@dataclass(frozen=True)
class Sharing:
    """Decodes first: of each sequence its new tokens, the pages of the document it begins with, and its own keys."""

    new: tuple[int, ...]
    shared: tuple[int, ...]
    own: tuple[int, ...]
    decodes: Levels = ()
    prefills: Levels = ()


def run(first: int, end: int, start: int, stop: int) -> SharedRun:
    return SharedRun(first, end, start, stop)


MANY = Sharing(
    new=(1,) * 64,
    shared=(40,) * 50 + (12,) * 10 + (0,) * 4,
    own=tuple(1 + 37 * i % 600 for i in range(64)),
    decodes=((run(0, 60, 0, 12),), (run(0, 50, 12, 40),)),
)
CASES = {
    "few": Sharing((1,) * 4, (40, 40, 40, 0), (1, 65, 128, 300), ((run(0, 3, 0, 40),),)),
    "many": MANY,
    "one_level": replace(MANY, decodes=((run(0, 50, 0, 40), run(50, 60, 0, 12)),)),
    "chunks": Sharing((5, 60, 9), (40, 40, 0), (5, 70, 200), (), ((run(0, 2, 0, 40),),)),
    "mixed": Sharing(
        (*(1,) * 20, 7, 33, 100),
        (*(30,) * 20, 40, 40, 3),
        (*range(1, 21), 8, 64, 130),
        ((run(2, 20, 0, 30),),),
        ((run(0, 2, 0, 40),),),
    ),
    "nested_beside": Sharing(
        (*(1,) * 20, 7, 33, 100),
        (*(30,) * 12, *(21,) * 8, 40, 40, 30),
        (*range(1, 21), 8, 64, 130),
        ((run(1, 20, 0, 14),), (run(2, 12, 14, 30), run(12, 19, 14, 21))),
        ((run(0, 3, 0, 30),), (run(0, 2, 30, 40),)),
    ),
    "only_chunks_share": Sharing((1, 1, 7, 9), (0, 0, 40, 40), (77, 1, 8, 9), (), ((run(0, 2, 0, 40),),)),
}


def build(case: Sharing, device: torch.device, heads: int = 8, kv_heads: int = 2, dim: int = 128) -> Step:
    """Pages of the document are 1, 2, ...; slots that nobody may read hold NaN."""
    g = generator((case, heads, dim), device)
    lens = [shared * PAGE + own for shared, own in zip(case.shared, case.own, strict=True)]
    tables, free = [], DOCUMENT + 1
    for shared, length in zip(case.shared, lens, strict=True):
        pages = -(-length // PAGE) - shared
        tables.append([*range(1, shared + 1), *range(free, free + pages)])
        free += pages
    width = max(map(len, tables))
    table = torch.tensor([row + [0] * (width - len(row)) for row in tables], dtype=torch.int32)
    new = torch.tensor(case.new)
    slots = [
        tables[b][p // PAGE] * PAGE + p % PAGE
        for b, (n, length) in enumerate(zip(case.new, lens, strict=True))
        for p in range(length - n, length)
    ]
    caches = [torch.full((free, kv_heads, PAGE, dim), torch.nan, dtype=torch.bfloat16, device=device) for _ in "kv"]
    for cache in caches:
        cache[1 : DOCUMENT + 1] = randn((DOCUMENT, kv_heads, PAGE, dim), torch.bfloat16, g)
        for b, (n, length) in enumerate(zip(case.new, lens, strict=True)):
            j = torch.arange(case.shared[b] * PAGE, length - n)
            own = table[b, j // PAGE].long().to(device)
            cache[own, :, j.to(device) % PAGE] = randn((len(j), kv_heads, dim), torch.bfloat16, g)
    metadata = PagedMetadata(
        cu_seqlens_q=torch.cat((new.new_zeros(1), new.cumsum(0))).to(device=device, dtype=torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        block_table=table.to(device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        num_decodes=sum(n == 1 for n in case.new),
        max_seqlen_q=max(case.new),
        max_seqlen_k=max(lens),
    )
    q, k, v = (randn((sum(case.new), h, dim), torch.bfloat16, g) for h in (heads, kv_heads, kv_heads))
    return Step(q, k, v, caches[0], caches[1], metadata)


def with_sharing(step: Step, case: Sharing, max_rows: int | None = None) -> Step:
    meta, first = step.metadata, step.metadata.num_decodes
    fields: dict[str, Any] = {}
    parts = {"shared_decodes": (case.decodes, slice(0, first)), "shared_prefills": (case.prefills, slice(first, None))}
    for name, (levels, part) in parts.items():
        if levels:
            most = max_rows if name == "shared_decodes" else None
            arrays = group_arrays(levels, case.new[part], block_size=PAGE, max_rows=most)
            groups, own_starts = (
                torch.from_numpy(x.copy()).to(step.q.device) for x in (arrays.groups, arrays.own_starts)
            )
            fields[name] = shared_pages(groups, own_starts, meta.block_table[part], arrays.max_rows)
    return replace(step, metadata=replace(meta, **fields))


def check_step(case: Sharing, device: torch.device, **options: Any) -> None:
    step = with_sharing(build(case, device), case)
    out = step.attend(**options)
    args = replace(step.args(), **options)
    check(args, (out, _lse_of(args)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_step_over_shared_pages_meets_the_error_rule(name: str, device: torch.device) -> None:
    check_step(CASES[name], device)
    sinks = randn((8,), torch.bfloat16, generator("sinks", device))
    check_step(CASES[name], device, sinks=sinks)


@pytest.mark.gpu
def test_layers_with_windows_read_every_sequence_alone(device: torch.device) -> None:
    for options in ({"window_left": 1000}, {"chunk_size": 512}):
        check_step(CASES["mixed"], device, **options)


def test_a_step_over_shared_pages_is_right_on_cpu() -> None:
    check_step(CASES["few"], torch.device("cpu"))
    check_step(CASES["nested_beside"], torch.device("cpu"))
    check_step(CASES["only_chunks_share"], torch.device("cpu"))


@pytest.mark.parametrize("missing", [1, 40])
@pytest.mark.parametrize("name", ["mixed", "nested_beside"])
def test_decodes_that_share_pages_may_be_missing(name: str, missing: int, device: torch.device) -> None:
    case = CASES[name]
    step = build(case, device)
    meta = with_missing_decodes(step.metadata, missing)
    count = meta.num_decodes
    arrays = group_arrays(case.decodes, count, block_size=PAGE, num_levels=len(case.decodes), num_groups=count)
    groups, own_starts = (torch.from_numpy(x.copy()).to(device) for x in (arrays.groups, arrays.own_starts))
    pages = shared_pages(groups, own_starts, meta.block_table[: meta.num_decodes], arrays.max_rows)
    out = replace(step, metadata=replace(meta, shared_decodes=pages)).attend()
    args = step.args()
    check(args, (out, _lse_of(args)))


REPLAYED: dict[str, Levels] = {
    "all_that_share": ((run(0, 60, 0, 12),),),
    "nothing": (),
    "two_groups": ((run(0, 20, 0, 40), run(30, 60, 0, 12)),),
    "pairs": (tuple(run(i, i + 2, 0, 12) for i in range(0, 60, 2)),),
    "documents": ((run(0, 60, 0, 12),), (run(0, 9, 12, 40), run(9, 50, 12, 33))),
    "pairs_within": ((run(0, 50, 0, 7),), tuple(run(i, i + 2, 7, 40) for i in range(0, 50, 2))),
}


def _recorded(levels: Levels, rows: int, num_levels: int) -> tuple[np.ndarray, np.ndarray]:
    """Of the first rows."""
    inside = tuple(
        tuple(replace(one, end=min(one.end, rows)) for one in level if one.first + 1 < rows) for level in levels
    )
    arrays = group_arrays(inside, rows, block_size=PAGE, num_levels=num_levels, num_groups=rows)
    return arrays.groups, arrays.own_starts


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [12, 64])
@pytest.mark.parametrize("num_levels", [1, 2])
def test_a_recorded_step_follows_what_is_shared(rows: int, num_levels: int, cuda: torch.device) -> None:
    """Groups change between replays of one graph; each replay is the plain step, to rounding."""
    step = build(MANY, cuda)
    table, lens = step.metadata.block_table[:rows].contiguous(), step.metadata.seq_lens[:rows].contiguous()
    plain = PagedMetadata(
        step.metadata.cu_seqlens_q[: rows + 1], lens, table, step.metadata.slot_mapping[:rows].contiguous(), rows, 1,
        table.shape[1] * PAGE,
    )  # fmt: skip
    fixed = [torch.from_numpy(x.copy()).to(cuda) for x in _recorded((), rows, num_levels)]
    q, k, v = (x[:rows].contiguous() for x in (step.q, step.k, step.v))

    def work() -> Tensor:
        shared = replace(plain, shared_decodes=shared_pages(fixed[0], fixed[1], table, rows))
        return paged_attention(q, k, v, step.k_cache, step.v_cache, shared, softmax_scale=0.1)

    graph, out = captured(work)
    for levels in REPLAYED.values():
        if len(levels) > num_levels:
            continue
        for target, array in zip(fixed, _recorded(levels, rows, num_levels), strict=True):
            target.copy_(torch.from_numpy(array.copy()))
        q.copy_(torch.randn_like(q))
        graph.replay()
        want = paged_attention(q, k, v, step.k_cache, step.v_cache, plain, softmax_scale=0.1)
        torch.testing.assert_close(out.float(), want.float(), atol=0.02, rtol=0.02)


@pytest.mark.gpu
def test_one_document_is_read_by_the_tensor_cores_once(cuda: torch.device) -> None:
    """On Hopper the 64 rows of a shared pass do not go to the decode kernel."""
    step = with_sharing(build(MANY, cuda, heads=32, kv_heads=8), MANY)
    before = dispatch.calls().get("flash_decode", 0)
    step.attend()
    if torch.cuda.get_device_capability(cuda) == (9, 0):
        assert dispatch.calls()["flash_decode"] == before + 1  # the suffixes
