"""The engine's door: paged_attention stores a step's keys and values and attends through the pages, decodes first."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_backend import paged_attention
from attention_backend.metadata import PagedMetadata
from attention_backend.problem import AttentionArgs

from .error_rule import check
from .problems import block_table, generator, randn

CPU = torch.device("cpu")
#: (new tokens, cached prefix); sequences with one new token come first.
BATCHES = {
    "decode": [(1, 300), (1, 0), (1, 64), (1, 1999)],
    "prefill": [(300, 0), (64, 64), (130, 777)],
    "mixed": [(1, 300), (1, 63), (1, 0), (200, 100), (37, 0), (2, 500)],
    "ragged": [(1, 2000), (180, 9000), (300, 0), (70, 2500), (65, 1025)],  # tiles of very different lengths
    "few": [(17, 5000), (19, 0), (33, 1000)],
}
SMALL = {"decode": [(1, 30), (1, 0)], "prefill": [(9, 0), (7, 16)], "mixed": [(1, 30), (1, 15), (12, 20), (2, 0)]}


@dataclass(frozen=True)
class Step:
    """The tensors of one engine step; pages `[num_blocks, kv_heads, block_size, head_dim]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    metadata: PagedMetadata

    def attend(self, **options: Any) -> Tensor:
        scale = self.q.shape[-1] ** -0.5
        return paged_attention(
            self.q, self.k, self.v, self.k_cache, self.v_cache, self.metadata, softmax_scale=scale, **options
        )

    def args(self) -> AttentionArgs:
        """The same attention as one problem, once the pages hold the new tokens."""
        meta = self.metadata
        return AttentionArgs(
            self.q,
            self.k_cache.transpose(1, 2),
            self.v_cache.transpose(1, 2),
            self.q.shape[-1] ** -0.5,
            cu_seqlens_q=meta.cu_seqlens_q,
            max_seqlen_q=meta.max_seqlen_q,
            max_seqlen_k=meta.max_seqlen_k,
            seqused_k=meta.seq_lens,
            block_table=meta.block_table,
            window_right=0,
        )


def step(
    batch: list[tuple[int, int]],
    device: torch.device,
    page: int = 64,
    dim: int = 128,
    *,
    dim_v: int = 0,
    heads: int = 8,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.bfloat16,
) -> Step:
    g, host = generator((batch, page, dim), device), generator((batch, page), CPU)
    new, lens = [n for n, _ in batch], [n + prefix for n, prefix in batch]
    num_blocks = sum(-(-n // page) for n in lens) + 2
    table = block_table(lens, page, num_blocks, host)
    positions = [range(prefix, prefix + n) for n, prefix in batch]
    slots = [int(table[b, p // page]) * page + p % page for b, ps in enumerate(positions) for p in ps]
    metadata = PagedMetadata(
        cu_seqlens_q=torch.tensor([0, *new]).cumsum(0).to(device=device, dtype=torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        block_table=table.to(device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        num_decodes=sum(n == 1 for n in new),
        max_seqlen_q=max(new),
        max_seqlen_k=max(lens),
    )
    dims = (dim, dim_v or dim)
    q = randn((sum(new), heads, dim), dtype, g)
    k, v = (randn((sum(new), kv_heads, d), dtype, g) for d in dims)
    # Slots of the future are NaN: they may not be read before they are written.
    caches = [torch.full((num_blocks, kv_heads, page, d), torch.nan, dtype=dtype, device=device) for d in dims]
    for b, (_, prefix) in enumerate(batch):
        for cache, d in zip(caches, dims, strict=True):
            j = torch.arange(prefix, device=device)
            cache[metadata.block_table[b, j // page].long(), :, j % page] = randn((prefix, kv_heads, d), dtype, g)
    return Step(q, k, v, caches[0], caches[1], metadata)


def check_step(batch: list[tuple[int, int]], device: torch.device, page: int = 64) -> None:
    problem = step(batch, device, page)
    out = problem.attend()
    slots = problem.metadata.slot_mapping
    assert torch.equal(problem.k_cache[slots // page, :, slots % page], problem.k)
    assert torch.equal(problem.v_cache[slots // page, :, slots % page], problem.v)
    args = problem.args()
    truth_lse = _lse_of(args)
    check(args, (out, truth_lse))


def check_options(batch: list[tuple[int, int]], device: torch.device) -> None:
    problem = step(batch, device)
    sinks = randn((8,), torch.bfloat16, generator("sinks", device))
    cases: list[tuple[dict[str, Any], AttentionArgs]] = [
        ({"window_left": 100}, replace(problem.args(), window_left=100)),
        ({"chunk_size": 64}, replace(problem.args(), chunk_size=64)),
        ({"softcap": 10.0, "sinks": sinks}, replace(problem.args(), softcap=10.0, sinks=sinks)),
    ]
    for options, args in cases:
        check(args, (problem.attend(**options), _lse_of(args)))


def _lse_of(args: AttentionArgs) -> Tensor:
    """paged_attention returns no lse; the rule is given the true one."""
    from .oracle import attention

    return attention(args)[1].float()


@pytest.mark.gpu
@pytest.mark.parametrize("page", [16, 32, 64, 128])
@pytest.mark.parametrize("name", BATCHES)
def test_a_step_stores_and_attends(name: str, page: int, device: torch.device) -> None:
    check_step(BATCHES[name], device, page)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BATCHES)
def test_windows_chunks_softcap_and_sinks_reach_every_row(name: str, device: torch.device) -> None:
    check_options(BATCHES[name], device)


@pytest.mark.parametrize("name", SMALL)
def test_a_step_stores_and_attends_on_cpu(name: str) -> None:
    check_step(SMALL[name], CPU, 16)


def test_windows_chunks_softcap_and_sinks_reach_every_row_on_cpu() -> None:
    check_options(SMALL["mixed"], CPU)


def with_missing_decodes(meta: PagedMetadata, missing: int) -> PagedMetadata:
    """Room for decodes that are not there: the others' rows follow the present ones at once."""
    here = meta.num_decodes

    def inserted(x: Tensor, value: Tensor) -> Tensor:
        return torch.cat((x[:here], value.expand(missing, *x.shape[1:]), x[here:]))

    lens = inserted(meta.seq_lens, meta.seq_lens.new_zeros(1))
    return replace(
        meta,
        cu_seqlens_q=inserted(meta.cu_seqlens_q, meta.cu_seqlens_q[here]),
        seq_lens=lens,
        block_table=inserted(meta.block_table, meta.block_table[:1]),
        num_decodes=here + missing,
        decodes_here=(lens[: here + missing] > 0)[:, None, None],
    )


@pytest.mark.parametrize("missing", [1, 30, 60])
def test_decodes_may_be_missing(missing: int, device: torch.device) -> None:
    whole = step([(1, 700), (1, 63), (1, 5), (130, 300), (7, 0)], device)
    out = replace(whole, metadata=with_missing_decodes(whole.metadata, missing)).attend()
    args = whole.args()
    check(args, (out, _lse_of(args)))
    if device.type == "cuda":
        assert torch.equal(out, whole.attend())


def chunks_alone(problem: Step) -> tuple[Step, int]:
    """The same step without its decodes, whose keys are in their pages; and how many there were."""
    meta, decodes = problem.metadata, problem.metadata.num_decodes
    metadata = replace(
        meta,
        cu_seqlens_q=meta.cu_seqlens_q[decodes:] - decodes,
        seq_lens=meta.seq_lens[decodes:],
        block_table=meta.block_table[decodes:],
        slot_mapping=meta.slot_mapping[decodes:],
        num_decodes=0,
    )
    rows = {name: getattr(problem, name)[decodes:] for name in ("q", "k", "v")}
    return replace(problem, **rows, metadata=metadata), decodes


BESIDE = [(1, 3000 + 97 * i) for i in range(24)]


@pytest.mark.gpu
@pytest.mark.parametrize("chunks", [[(700, 2500), (300, 0)], [(2, 60)], [(70, 20_000)]], ids=str)
def test_decodes_and_chunks_that_run_at_once_leave_each_other_alone(
    chunks: list[tuple[int, int]], device: torch.device
) -> None:
    problem = step(BESIDE + chunks, device, page=32)
    out = problem.attend()
    check(problem.args(), (out, _lse_of(problem.args())))
    alone, decodes = chunks_alone(problem)
    assert torch.equal(out[decodes:], alone.attend())
    for _ in range(50):
        assert torch.equal(problem.attend(), out)


@pytest.mark.gpu
def test_decodes_and_chunks_run_at_once_in_graphs(device: torch.device) -> None:
    problem = step([*BESIDE, (700, 2500)], device, page=32)
    problem.attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = problem.attend()
    for shorter in (0, 1000, 2900):
        problem.metadata.seq_lens[: len(BESIDE)] -= shorter
        out.fill_(torch.nan)
        for _ in range(3):
            graph.replay()
        assert torch.equal(out, problem.attend())
        problem.metadata.seq_lens[: len(BESIDE)] += shorter
