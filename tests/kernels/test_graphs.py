"""CUDA graphs whose lengths change between replays, streams, and torch.compile without a graph break."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from .problems import block_table, generator, randn
from .public import flash_attn_func, flash_attn_with_kvcache
from .test_paged_attention import BATCHES, SMALL, Step, step

CPU = torch.device("cpu")
BF16 = torch.bfloat16


def captured(work: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """The work as a graph, after a warm-up on a side stream; the tensor is where a replay leaves its result."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    return graph, out


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [0, 1, 3])
@pytest.mark.parametrize("page", [0, 64], ids=["contiguous", "paged"])
def test_a_graph_follows_lengths_that_change_between_replays(page: int, splits: int, cuda: torch.device) -> None:
    g = generator(("graph", page, splits), cuda)
    batch, slots, heads, kv_heads, dim = 4, 8192, 16, 4, 128
    q, k, v = (randn((batch, 1, h, dim), BF16, g) for h in (heads, kv_heads, kv_heads))
    shape = (batch * slots // page, page) if page else (batch, slots)
    caches = [randn((*shape, kv_heads, dim), BF16, g) for _ in range(2)]
    options: dict[str, object] = {"causal": True, "num_splits": splits}
    if page:
        options["block_table"] = block_table([slots] * batch, page, shape[0], generator("graph", CPU)).to(cuda)
    lens = torch.full((batch,), 100, dtype=torch.int32, device=cuda)

    def work(k_cache: Tensor = caches[0], v_cache: Tensor = caches[1]) -> Tensor:
        out: Tensor = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lens, **options)
        return out

    graph, out = captured(work)
    for new_lens in ([1, 2, 3, 4], [8191, 0, 17, 5000], [64, 63, 65, 128], [0, 0, 0, 0], [8000, 8000, 8000, 8000]):
        lens.copy_(torch.tensor(new_lens))
        for tensor in (q, k, v):
            tensor.copy_(randn(tuple(tensor.shape), BF16, g))
        untouched = [cache.clone() for cache in caches]
        graph.replay()
        assert torch.equal(out, work(*untouched)), f"replay with lengths {new_lens} differs from a plain call"
        assert all(torch.equal(a, b) for a, b in zip(caches, untouched, strict=True))


@pytest.mark.gpu
def test_an_engine_step_replays_with_other_lengths_and_pages(cuda: torch.device) -> None:
    steps = [step([(1, 300), (1, 10), (1, 64)], cuda), step([(1, 5), (1, 319), (1, 128)], cuda)]
    num_blocks = max(s.k_cache.shape[0] for s in steps)
    k_cache, v_cache = (torch.zeros((num_blocks, *steps[0].k_cache.shape[1:]), dtype=BF16, device=cuda) for _ in "kv")
    q, k, v = (torch.zeros_like(x) for x in (steps[0].q, steps[0].k, steps[0].v))
    meta = replace(
        steps[0].metadata,
        seq_lens=torch.ones_like(steps[0].metadata.seq_lens),
        slot_mapping=torch.full_like(steps[0].metadata.slot_mapping, -1),
        block_table=torch.zeros((3, 16), dtype=torch.int32, device=cuda),
        max_seqlen_k=16 * 64,
    )
    static = Step(q, k, v, k_cache, v_cache, meta)
    graph, out = captured(static.attend)
    for now in (*steps, steps[0]):
        for target, source in ((q, now.q), (k, now.k), (v, now.v)):
            target.copy_(source)
        k_cache[: now.k_cache.shape[0]], v_cache[: now.v_cache.shape[0]] = now.k_cache, now.v_cache
        meta.seq_lens.copy_(now.metadata.seq_lens)
        meta.slot_mapping.copy_(now.metadata.slot_mapping)
        meta.block_table[:, : now.metadata.block_table.shape[1]] = now.metadata.block_table
        graph.replay()
        torch.testing.assert_close(out, now.attend(), atol=4e-3, rtol=1e-2)  # tables of other widths split differently


@pytest.mark.gpu
def test_kernels_run_on_the_current_stream(cuda: torch.device) -> None:
    """On a busy side stream the inputs arrive late; a kernel on any other stream would read what was there before."""
    g = generator("stream", cuda)
    inputs = [randn((2, 256, 4, 64), BF16, g) for _ in range(3)]
    want = flash_attn_func(*inputs, causal=True)
    late = [torch.zeros_like(x) for x in inputs]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        for target, source in zip(late, inputs, strict=True):
            target.copy_(source)
        out = flash_attn_func(*late, causal=True)
    side.synchronize()
    assert torch.equal(out, want)


def check_compiled(device: torch.device, backend: str) -> None:
    """One graph, forward and backward, the same bits as eager; then another length without a break."""

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        doubled: Tensor = flash_attn_func(q, k, v, causal=True) * 2.0
        return doubled

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for seqlen in (33, 70):
        g = generator(("compile", seqlen), device)
        q, k, v = (randn((2, seqlen, h, 64), BF16, g).requires_grad_() for h in (4, 2, 2))
        want, out = layer(q, k, v), compiled(q, k, v)
        assert torch.equal(out, want)
        grad = randn(tuple(out.shape), BF16, g)
        for a, b in zip(*(torch.autograd.grad(x, (q, k, v), grad) for x in (out, want)), strict=True):
            torch.testing.assert_close(a, b)


def check_compiled_step(batch: list[tuple[int, int]], device: torch.device, backend: str) -> None:
    """The engine's door mutates its pages inside the compiled graph too."""
    eager, inside = step(batch, device), step(batch, device)
    torch._dynamo.reset()
    out = torch.compile(lambda: inside.attend() + 0.0, fullgraph=True, backend=backend)()
    assert torch.equal(out, eager.attend() + 0.0)
    assert torch.equal(inside.k_cache.nan_to_num(), eager.k_cache.nan_to_num())
    assert torch.equal(inside.v_cache.nan_to_num(), eager.v_cache.nan_to_num())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # of the compiler's own
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_as_one_graph(backend: str, cuda: torch.device) -> None:
    check_compiled(cuda, backend)
    check_compiled_step(BATCHES["mixed"], cuda, backend)


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_compiles_as_one_graph_on_cpu() -> None:
    check_compiled(CPU, "aot_eager")
    check_compiled_step(SMALL["mixed"], CPU, "aot_eager")
