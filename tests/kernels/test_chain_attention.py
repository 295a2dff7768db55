"""The attention in front of a chain: the error rule against plain torch, lengths of all kinds, graphs, the same bits at
every run."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention_backend import layer_chain as chains
from attention_backend.layer_chain import MOST_ROWS, ChainHeads, NextAttention, OwnAttention, layer_chain
from attention_backend.metadata import KVPages

from .error_rule import assert_out_close, poisoned_memory
from .problems import generator, randn
from .test_graphs import captured
from .test_layer_chain import HALVES, OPTIONS, Chain, doubles, plain

PAGE = 16
LENGTHS = ((1,), (16, 17), (63, 1, 200), (88,), (89, 700), (1023, 31, 1025), (2049,), (4096, 0, 65, 300))

pytestmark = pytest.mark.gpu


class Front:
    """Queries, and pages in disorder of which only the keys in use are numbers."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        lengths: tuple[int, ...],
        heads: int,
        kv_heads: int,
        dim: int,
        *,
        page: int = PAGE,
    ) -> None:
        g = generator(("front", dtype, lengths, heads, kv_heads, dim, page), device)
        self.g, (self.heads, self.kv_heads, self.dim), self.dtype = g, (heads, kv_heads, dim), dtype
        self.page = page
        self.width = max(-(-n // page) for n in lengths) + 1  # an entry that nobody may look behind
        count = len(lengths) * self.width + 1
        order = torch.randperm(count - 1, generator=g, device=device)[: len(lengths) * self.width] + 1
        self.table = order.to(torch.int32).view(len(lengths), self.width)
        self.lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.pages = KVPages(*(self._pages(count) for _ in range(2)))
        self.queries = randn((len(lengths), heads, dim), dtype, g)

    @property
    def own(self) -> OwnAttention:
        return OwnAttention(self.pages, self.table, self.lens, 0.9 * self.dim**-0.5)

    def _pages(self, count: int) -> Tensor:
        """A view of a pool in which a token's heads lie beside each other, and another's pages between them."""
        pool = randn((count, self.page, 2, self.kv_heads, self.dim), self.dtype, self.g)
        pages = pool[:, :, 0].transpose(1, 2)
        used = torch.zeros(count, self.page, dtype=torch.bool, device=pages.device)
        for row, length in zip(self.table.tolist(), self.lens.tolist(), strict=True):
            for i, page in enumerate(row):
                used[page, : max(0, length - i * self.page)] = True
        pages.masked_fill_(~used[:, None, :, None], torch.nan)
        return pages

    def attended(self, dtype: torch.dtype) -> Tensor:
        """By plain torch."""
        rows = []
        for q, table, length in zip(self.queries.to(dtype), self.table, self.lens.tolist(), strict=True):
            k, v = (x[table.long()].transpose(0, 1).flatten(1, 2)[:, :length].to(dtype) for x in self.pages)
            k, v = (x.repeat_interleave(self.heads // self.kv_heads, dim=0) for x in (k, v))
            scores = (q[:, None] @ k.transpose(1, 2)) * self.own.softmax_scale
            rows.append((torch.softmax(scores, -1) @ v).flatten())  # zeros without keys
        return torch.stack(rows)


def check(front: Front, sizes: tuple[int, int, int]) -> None:
    """sizes: of the residual, of the MLP, of what follows."""
    device = front.queries.device
    chain = Chain(device, front.dtype, (front.heads * front.dim, *sizes))
    _, residual = chain.rows(front.lens.shape[0])
    with poisoned_memory():
        ours = layer_chain(front.queries, residual, chain.weights, OPTIONS, own=front.own)
        again = layer_chain(front.queries, residual, chain.weights, OPTIONS, own=front.own)
    truth = plain(front.attended(torch.float64), residual.double(), doubles(chain.weights), OPTIONS)
    same = plain(front.attended(front.dtype), residual, chain.weights, OPTIONS)
    for out, exact, theirs, repeated in zip(ours, truth, same, again, strict=True):
        assert_out_close(out, exact, theirs)
        assert torch.equal(out, repeated)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths(lengths: tuple[int, ...], dtype: torch.dtype, hopper: torch.device) -> None:
    check(Front(hopper, dtype, lengths, 8, 2, 128), (1032, 1544, 264))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(32, 8, 128), (14, 2, 64), (8, 1, 96), (5, 1, 128), (3, 3, 32), (16, 16, 128), (24, 8, 64), (14, 2, 128)],
)
def test_heads(heads: int, kv_heads: int, dim: int, hopper: torch.device) -> None:
    for lengths in ((300,), (5, 129, 800)):
        check(Front(hopper, torch.bfloat16, lengths, heads, kv_heads, dim), (520, 1024, 72))


@pytest.mark.parametrize("page", [1, 8, 24, 256])
def test_pages_of_any_size(page: int, hopper: torch.device) -> None:
    check(Front(hopper, torch.float16, (70, 257), 6, 2, 64, page=page), (264, 136, 72))


def test_blocks_without_a_part_of_the_first_phase_leave_the_sums_alone(hopper: torch.device) -> None:
    """Qwen3-0.6B's sizes: the norm's weights come where the sums of warps lie, in blocks that have no product first."""
    front = Front(hopper, torch.bfloat16, (900,), 16, 8, 128)
    chain = Chain(hopper, torch.bfloat16, (2048, 1024, 3072, 4096))
    _, residual = chain.rows(1)
    expected = layer_chain(front.queries, residual, chain.weights, OPTIONS, own=front.own)
    for _ in range(500):
        again = layer_chain(front.queries, residual, chain.weights, OPTIONS, own=front.own)
        assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


def test_a_graph_follows_lengths_and_tables(hopper: torch.device) -> None:
    """Recorded short, replayed long; the next layer's pages are written meanwhile."""
    front = Front(hopper, torch.bfloat16, (3000, 2000), 8, 2, 128)
    chain = Chain(hopper, torch.bfloat16, (1024, 1024, 2816, (8 + 4) * 128))
    _, residual = chain.rows(2)
    nexts = KVPages(*(torch.zeros(4, 2, PAGE, 128, dtype=torch.bfloat16, device=hopper) for _ in range(2)))
    tables = tuple(torch.rand(2, 64, generator=front.g, device=hopper) for _ in range(2))
    following = NextAttention(8, nexts, torch.tensor([3, 40], device=hopper), *tables)

    def work() -> Tensor:
        total, queries = chains.layer_chain_to_pages(
            front.queries, residual, chain.weights, OPTIONS, following, own=front.own
        )
        return torch.cat([total, queries.flatten(1), nexts.k.flatten()[None].expand(2, -1)], dim=1)

    lens = front.lens.clone()
    front.lens.fill_(1)
    graph, out = captured(work)
    for n in (lens, lens // 7, lens):
        front.lens.copy_(n)
        graph.replay()
        assert torch.equal(out, work())
    front.table.copy_(front.table.flip(0))
    front.lens.copy_(lens.flip(0))
    graph.replay()
    assert torch.equal(out, work())
    first = out.clone()
    for _ in range(100):
        graph.replay()
    assert torch.equal(out, first)


def test_what_it_refuses_has_words(hopper: torch.device) -> None:
    widths = {"attended_width": 512, "width": 512, "gated_width": 1024}

    def reason(heads: ChainHeads, rows: int = 1) -> str | None:
        return chains.refuses(hopper, torch.bfloat16, **widths, rows=rows, heads=heads)

    plain_heads = ChainHeads(4, 2, 128)
    assert reason(plain_heads, MOST_ROWS) is None
    for other, words in (
        (replace(plain_heads, head_dim=80), "heads of 80"),
        (replace(plain_heads, group=9), "9 query heads"),
        (replace(plain_heads, num_kv_heads=100), "100 key heads"),
    ):
        found = reason(other, MOST_ROWS)
        assert found is not None
        assert words in found
