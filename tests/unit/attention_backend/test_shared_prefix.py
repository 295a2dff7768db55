"""Shared-prefix attention equals plain attention over each request's joined keys, on the CPU in float64."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_backend import AttentionArgs, UnsupportedError, shared_prefix
from attention_backend.cascade import cascade_attention_op, merge_states_op
from attention_backend.heuristics.prefix import least_saved_keys
from attention_backend.reference import standard
from attention_backend.shared_prefix import PrefixGroups, merge_states

PAGE, HEADS, KV_HEADS, DIM = 4, 4, 2, 16
F64 = torch.float64
# Loosely typed: what they return depends on return_lse.
cascade_attention: Callable[..., Any] = shared_prefix.cascade_attention
shared_prefix_attention: Callable[..., Any] = shared_prefix.shared_prefix_attention


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Pool:
    """Caches that hand out pages in random order; every slot that nobody was given holds NaN."""

    def __init__(self, dtype: torch.dtype = F64, num_blocks: int = 64) -> None:
        self.k, self.v = (torch.full((num_blocks, PAGE, KV_HEADS, DIM), torch.nan, dtype=dtype) for _ in "kv")
        self._free = torch.randperm(num_blocks).tolist()

    def table(self, lens: Sequence[int]) -> Tensor:
        """int32 `[len(lens), max_pages]` of fresh pages with random keys and values."""
        pages = [[self._free.pop() for _ in range(-(-n // PAGE))] for n in lens]
        table = torch.full((len(lens), max(map(len, pages))), -1, dtype=torch.int32)
        for row, (own, n) in enumerate(zip(pages, lens, strict=True)):
            table[row, : len(own)] = i32(*own)
            for j in range(n):
                for cache in (self.k, self.v):
                    cache[own[j // PAGE], j % PAGE] = torch.randn(KV_HEADS, DIM).to(cache.dtype)
        return table

    def keys(self, table: Tensor, n: int) -> tuple[Tensor, Tensor]:
        pages = table[: -(-n // PAGE)].long()
        return self.k[pages].flatten(0, 1)[:n], self.v[pages].flatten(0, 1)[:n]


def plain(
    q: Tensor, runs: Sequence[Sequence[tuple[Tensor, Tensor]]], sinks: Tensor | None = None, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Row by row, q `[rows, heads, dim]`, over the joined runs of keys: out `[rows, ...]`, lse `[heads, rows]`."""
    outs, lses = [], []
    for row, parts in zip(q, runs, strict=True):
        k, v = (torch.cat([part[i] for part in parts]).unsqueeze(0) for i in (0, 1))
        args = AttentionArgs(row.view(1, 1, HEADS, DIM), k, v, DIM**-0.5, sinks=sinks, softcap=softcap)
        out, lse = standard.attention(args)
        outs.append(out.view(HEADS, DIM))
        lses.append(lse.view(HEADS))
    return torch.stack(outs), torch.stack(lses, 1)


def seen(suffix_len: int, num_rows: int) -> list[int]:
    """How many suffix keys each row of a request sees."""
    return [max(0, suffix_len - num_rows + t + 1) for t in range(num_rows)]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("prefix_len", [0, 1, 9, 16])
@pytest.mark.parametrize("option", ["plain", "sinks", "softcap"])
def test_one_prefix_equals_joined_keys(rows: int, prefix_len: int, option: str) -> None:
    pool, suffix_lens = Pool(), [5, 0, 3, 13]
    prefix, suffix = pool.table([max(prefix_len, 1)]), pool.table(suffix_lens)
    q = torch.randn(4, rows, HEADS, DIM, dtype=F64)
    sinks = torch.randn(HEADS, dtype=F64) if option == "sinks" else None
    softcap = 2.0 if option == "softcap" else 0.0
    runs = [
        (pool.keys(prefix[0], prefix_len), pool.keys(suffix[r], n))
        for r, own in enumerate(suffix_lens)
        for n in seen(own, rows)
    ]
    want, want_lse = plain(q.flatten(0, 1), runs, sinks, softcap)
    for length in (prefix_len, i32(prefix_len)):
        out, lse = shared_prefix_attention(
            q, pool.k, pool.v, prefix_block_table=prefix[0], prefix_len=length, suffix_block_table=suffix,
            suffix_lens=i32(*suffix_lens), sinks=sinks, softcap=softcap, return_lse=True,
        )  # fmt: skip
        torch.testing.assert_close(out.flatten(0, 1), want)
        torch.testing.assert_close(lse, want_lse.unflatten(1, (4, rows)).transpose(0, 1))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
def test_groups_within_groups_equal_joined_keys(packed: bool) -> None:
    """A system prompt for all six requests, documents for the first three and the next two, none for the last."""
    pool = Pool()
    num_rows = [2, 1, 3, 1, 2, 1] if packed else [2] * 6
    suffix_lens, documents = [7, 2, 4, 1, 9, 5], [8, 13, 0]
    group_of = [0, 0, 0, 1, 1, 2]
    system, document, suffix = pool.table([6]), pool.table(documents), pool.table(suffix_lens)
    starts = [0, *torch.tensor(num_rows).cumsum(0).tolist()]
    cu_rows = i32(0, starts[3], starts[5], starts[6])
    q = torch.randn(starts[-1], HEADS, DIM, dtype=F64)
    runs = [
        (pool.keys(system[0], 6), pool.keys(document[g], documents[g]), pool.keys(suffix[r], n))
        for r, g in enumerate(group_of)
        for n in seen(suffix_lens[r], num_rows[r])
    ]
    want, want_lse = plain(q, runs)
    prefixes = [PrefixGroups(system, i32(6)), PrefixGroups(document, i32(*documents), cu_rows, max(num_rows) * 3)]
    layout: dict[str, Any] = {"cu_seqlens_q": i32(*starts), "max_seqlen_q": 3} if packed else {}
    out, lse = cascade_attention(
        q if packed else q.unflatten(0, (6, 2)), pool.k, pool.v, prefixes, suffix_block_table=suffix,
        suffix_lens=i32(*suffix_lens), return_lse=True, **layout,
    )  # fmt: skip
    torch.testing.assert_close(out if packed else out.flatten(0, 1), want)
    torch.testing.assert_close(lse if packed else lse.transpose(0, 1).flatten(1), want_lse)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
def test_one_table_of_all_keys_serves_every_pass(packed: bool) -> None:
    """As the engine has it: levels and suffixes are stretches of the same tables, told by where they start."""
    pool, rows = Pool(), [2, 1, 3, 1] if packed else [2] * 4
    shared, own = pool.table([16])[0], pool.table([7, 2, 4, 9])
    tables = torch.stack(
        [torch.cat((shared[: 4 if r < 2 else 2 if r < 3 else 0], own[r], i32(0, 0, 0, 0)))[:7] for r in range(4)]
    )
    starts, lens = i32(16, 16, 8, 0), i32(23, 18, 12, 9)
    total = [0, *torch.tensor(rows).cumsum(0).tolist()]
    runs = [([pool.keys(tables[r], int(lens[r]) - rows[r] + t + 1)]) for r in range(4) for t in range(rows[r])]
    q = torch.randn(total[-1], HEADS, DIM, dtype=F64)
    want, want_lse = plain(q, runs)
    prefixes = [
        PrefixGroups(tables[[0, 3]], i32(8, 0), i32(0, total[3], total[4]), 6),
        PrefixGroups(tables[[1, 2]], i32(16, 0), i32(0, total[2], total[4]), 4, i32(8, 0)),
    ]
    layout: dict[str, Any] = {"cu_seqlens_q": i32(*total), "max_seqlen_q": 3} if packed else {}
    out, lse = cascade_attention(
        q if packed else q.unflatten(0, (4, 2)), pool.k, pool.v, prefixes, suffix_block_table=tables, suffix_lens=lens,
        suffix_starts=starts, return_lse=True, **layout,
    )  # fmt: skip
    torch.testing.assert_close(out if packed else out.flatten(0, 1), want)
    torch.testing.assert_close(lse if packed else lse.transpose(0, 1).flatten(1), want_lse)


def test_no_prefix_and_no_suffix_are_attention_over_what_there_is() -> None:
    pool = Pool()
    table, lens = pool.table([6, 6]), i32(6, 6)
    q = torch.randn(2, 1, HEADS, DIM, dtype=F64)
    nothing = torch.zeros(2, 0, dtype=torch.int32)
    alone = cascade_attention(q, pool.k, pool.v, (), suffix_block_table=table, suffix_lens=lens)
    shared = [PrefixGroups(table, lens, i32(0, 1, 2))]
    prefixed = cascade_attention(q, pool.k, pool.v, shared, suffix_block_table=nothing, suffix_lens=lens - lens)
    want, _ = plain(q.flatten(0, 1), [[pool.keys(table[r], 6)] for r in range(2)])
    torch.testing.assert_close(alone.flatten(0, 1), want)
    torch.testing.assert_close(prefixed.flatten(0, 1), want)
    out, lse = cascade_attention(
        q, pool.k, pool.v, (), suffix_block_table=nothing, suffix_lens=lens - lens, return_lse=True
    )
    assert not out.any()
    assert bool((lse == -torch.inf).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions_are_close(dtype: torch.dtype) -> None:
    pool = Pool(dtype)
    prefix, suffix = pool.table([10]), pool.table([3, 6])
    q = torch.randn(2, 1, HEADS, DIM, dtype=dtype)
    out, lse = shared_prefix_attention(
        q, pool.k, pool.v, prefix_block_table=prefix[0], prefix_len=10, suffix_block_table=suffix,
        suffix_lens=i32(3, 6), return_lse=True,
    )  # fmt: skip
    runs = [(pool.keys(prefix[0], 10), pool.keys(suffix[r], n)) for r, n in enumerate((3, 6))]
    want, want_lse = plain(q.flatten(0, 1), runs)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out.flatten(0, 1).double(), want, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.squeeze(2).double().mT, want_lse, atol=1e-5, rtol=1e-5)


def states(count: int, shape: tuple[int, ...], dtype: torch.dtype = F64) -> tuple[list[Tensor], list[Tensor]]:
    outs = [torch.randn(shape, dtype=dtype) for _ in range(count)]
    lses = [4 * torch.randn(*shape[:-3], shape[-2], shape[-3], dtype=dtype) for _ in range(count)]
    return outs, lses


@pytest.mark.parametrize("shape", [(7, HEADS, DIM), (2, 5, HEADS, DIM)], ids=["rows", "batch"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_merge_is_the_weighted_mean_by_logsumexp(count: int, shape: tuple[int, ...]) -> None:
    outs, lses = states(count, shape)
    sinks = torch.randn(HEADS, dtype=F64)
    for sink in (None, sinks):
        out, lse = merge_states(outs, lses, sinks=sink)
        logits = [*lses, sinks.unsqueeze(-1).expand(lses[0].shape)] if sink is not None else lses
        stacked = torch.stack(logits)
        torch.testing.assert_close(lse, stacked.logsumexp(0))
        weights = stacked.softmax(0)[:count].transpose(-1, -2).unsqueeze(-1)
        torch.testing.assert_close(out, (weights * torch.stack(outs)).sum(0))


def test_a_merge_reads_nothing_of_a_state_that_saw_nothing() -> None:
    outs, lses = states(3, (5, HEADS, DIM))
    lses[1][:, 2] = -torch.inf
    outs[1][2] = torch.nan
    for lse, out in zip(lses, outs, strict=True):
        lse[0, 4], out[4, 0] = -torch.inf, torch.nan
    out, lse = merge_states(outs, lses, sinks=torch.ones(HEADS, dtype=F64))
    assert not out[4, 0].any()
    assert lse[0, 4] == -torch.inf
    assert bool(out.isfinite().all())
    want, want_lse = merge_states([outs[0], outs[2]], [lses[0], lses[2]], sinks=torch.ones(HEADS, dtype=F64))
    torch.testing.assert_close(out[2], want[2])
    torch.testing.assert_close(lse[:, 2], want_lse[:, 2])


def test_merged_halves_of_keys_are_attention_over_all() -> None:
    q, k, v = torch.randn(2, 3, HEADS, DIM), *(torch.randn(2, 11, KV_HEADS, DIM) for _ in "kv")
    whole = AttentionArgs(q, k, v, 0.3)
    halves = [standard.attention(replace(whole, k=k[:, s], v=v[:, s])) for s in (slice(0, 4), slice(4, 11))]
    out, lse = merge_states(*zip(*halves, strict=True))
    want, want_lse = standard.attention(whole)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)


def call() -> dict[str, Any]:
    pool = Pool(torch.float32)
    return {
        "q": torch.randn(3, 2, HEADS, DIM),
        "k_cache": pool.k,
        "v_cache": pool.v,
        "prefix_block_table": pool.table([9])[0],
        "prefix_len": 9,
        "suffix_block_table": pool.table([4, 2, 7]),
        "suffix_lens": i32(4, 2, 7),
    }


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"window_size": (100, 0)}, UnsupportedError, "rows do not share what they see"),
    ({"prefix_len": 13}, ValueError, "prefix_len must be from 0 to 12"),
    ({"prefix_len": -1}, ValueError, "prefix_len must be from 0 to 12"),
    ({"prefix_len": torch.tensor([9])}, TypeError, "must be torch.int32"),
    ({"prefix_len": i32(9, 9)}, ValueError, r"must have shape \[1\]"),
    ({"prefix_block_table": i32(1).unsqueeze(0)}, ValueError, r"prefix_block_table must have shape \[any\]"),
    ({"suffix_block_table": i32(1, 2).unsqueeze(1)}, ValueError, r"block_table must have shape \[3, any\]"),
    ({"suffix_lens": i32(1, 2)}, ValueError, r"seqused_k must have shape \[3\]"),
    ({"q": torch.randn(3, 2, 3, DIM)}, ValueError, "multiple of num_kv_heads"),
    ({"q": torch.randn(3, 2, HEADS, DIM).requires_grad_()}, UnsupportedError, "has no gradient"),
    ({"sinks": torch.randn(3)}, ValueError, "sinks must have shape"),
    ({"softcap": -1.0}, ValueError, "softcap must be 0, or from"),
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED)
def test_refusals_say_what_is_wrong(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        shared_prefix_attention(**{**call(), **changes})


def test_groups_are_checked() -> None:
    good = call()
    table = good.pop("prefix_block_table").unsqueeze(0)
    lens = i32(good.pop("prefix_len"))
    with pytest.raises(ValueError, match="2 groups of requests need cu_rows"):
        cascade_attention(**good, prefixes=[PrefixGroups(table.expand(2, -1), lens.expand(2))])
    with pytest.raises(ValueError, match=r"cu_rows of a prefix must have shape \[2\]"):
        cascade_attention(**good, prefixes=[PrefixGroups(table, lens, i32(0, 2, 6))])
    with pytest.raises(UnsupportedError, match="7 levels"):
        cascade_attention(**good, prefixes=[PrefixGroups(table, lens)] * 7)


def test_states_are_checked() -> None:
    outs, lses = states(2, (5, HEADS, DIM))
    with pytest.raises(ValueError, match="one state at least"):
        merge_states([], [])
    with pytest.raises(ValueError, match=r"lses\[1\] must have shape \[4, 5\]"):
        merge_states(outs, [lses[0], lses[1].mT])
    with pytest.raises(TypeError, match=r"outs\[1\] must be torch.float64"):
        merge_states([outs[0], outs[1].float()], lses)
    with pytest.raises(UnsupportedError, match="merge_states has no gradient"):
        merge_states([x.requires_grad_() for x in outs], lses)


def test_gradients_may_be_off() -> None:
    arguments = call()
    arguments["q"].requires_grad_()
    with torch.no_grad():
        shared_prefix_attention(**arguments)


def test_operators_keep_torch_librarys_contract() -> None:
    c = call()
    rest = (c["suffix_block_table"], c["suffix_lens"], None, 0, 0.25, 0.0, torch.randn(HEADS))
    starts = ([None, i32(1)], i32(0, 1, 2), None, None)
    caches = (c["q"], c["k_cache"].nan_to_num(), c["v_cache"].nan_to_num())
    tables, lens = [c["prefix_block_table"].unsqueeze(0)] * 2, [i32(9), i32(5)]
    torch.library.opcheck(
        cascade_attention_op.overload, (*caches, tables, lens, [None, i32(0, 6)], [6, 6], *rest, *starts)
    )
    torch.library.opcheck(merge_states_op.overload, (*states(3, (5, HEADS, DIM)), torch.randn(HEADS, dtype=F64)))


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_compiles_as_one_graph() -> None:
    c = call()
    compiled = torch.compile(lambda: shared_prefix_attention(**c) + 0.0, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(), shared_prefix_attention(**c))


def test_a_level_pays_for_documents_and_not_for_system_prompts() -> None:
    least = least_saved_keys("cuda", 4096)  # 8 heads of 128, keys and values of 16 bits
    assert least > 3 * 100  # 4 requests, 100 tokens
    assert least > 7 * 1000
    assert 100 * least < 63 * 100_000
    assert least < 7 * 10_000
