"""The Hopper forward with its keys split: few query tiles over long contexts, partial results merged by flash_merge."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_backend.problem import AttentionArgs

from . import first_calls
from .error_rule import check, poisoned_memory
from .problems import block_table, generator, pool, randn
from .test_graphs import captured

SPLITS = (1, 2, 3, 7)


@dataclass(frozen=True)
class Chunks:
    """New tokens on cached contexts, causal, as a prefill step has them; `page` 0 is one contiguous sequence."""

    new: tuple[tuple[int, int], ...]  # (new tokens, cached before them)
    heads: int = 8
    kv_heads: int = 2
    dim: int = 128
    page: int = 64
    dtype: torch.dtype = torch.bfloat16
    varlen: bool = False
    sinks: bool = False
    options: tuple[tuple[str, int], ...] = (("window_right", 0),)

    def __str__(self) -> str:
        parts = "_".join(f"{n}on{cached}" for n, cached in self.new)
        flags = ["varlen"] * self.varlen + ["sinks"] * self.sinks + [f"{k}{v}" for k, v in self.options]
        name = f"{parts}-h{self.heads}/{self.kv_heads}-d{self.dim}-p{self.page}"
        return "-".join([name, str(self.dtype).removeprefix("torch."), *flags])


CASES = (
    Chunks(((512, 20_000),)),
    Chunks(((512, 20_000),), varlen=True, sinks=True),
    Chunks(((512, 9000),), dim=64),
    Chunks(((512, 9000),), dim=256, page=128),
    Chunks(((512, 9001),), dtype=torch.float16, page=16),
    Chunks(((512, 9000),), page=0, sinks=True),
    Chunks(((512, 9000),), options=()),
    Chunks(((512, 9000),), options=(("window_left", 3000), ("window_right", 0))),
    Chunks(((512, 9000),), options=(("window_right", 0), ("chunk_size", 2048))),
    Chunks(((200, 3000),), heads=32, kv_heads=8),
    Chunks(((77, 5000),), heads=16, kv_heads=1, sinks=True),
    Chunks(((130, 4000),), heads=6, kv_heads=6),
    Chunks(((512, 8000), (100, 3000), (1, 5), (0, 9), (65, 0), (3, 4000)), varlen=True),
    Chunks(((512, 8000), (300, 0), (200, 1111)), varlen=True, sinks=True, heads=16, kv_heads=2),
    Chunks(((70, 0),)),  # fewer key tiles than splits: the others see nothing
    Chunks(((3, 61),)),
)


def build(case: Chunks, device: torch.device) -> AttentionArgs:
    """Queries by sequence, or packed; NaN in every slot that nobody sees."""
    g, host = generator(case, device), generator(case, torch.device("cpu"))
    new, lens = [n for n, _ in case.new], [n + cached for n, cached in case.new]
    rows = (sum(new),) if case.varlen else (len(new), new[0])
    options: dict[str, Any] = dict(case.options)
    used = torch.tensor(lens, dtype=torch.int32, device=device)
    if case.varlen:
        options["cu_seqlens_q"] = torch.tensor([0, *new]).cumsum(0).to(device=device, dtype=torch.int32)
        options["max_seqlen_q"] = max(new)
    if case.sinks:
        options["sinks"] = randn((case.heads,), case.dtype, g)
    if case.page:
        num_blocks = sum(-(-n // case.page) for n in lens) + 1
        table = block_table(lens, case.page, num_blocks, host)
        options |= {"block_table": table.to(device), "max_seqlen_k": max(lens)}
        k, v = (pool(num_blocks, case.page, case.kv_heads, case.dim, case.dtype, g, hnd=True) for _ in "kv")
        seen = torch.zeros((num_blocks, case.page), dtype=torch.bool)
        for pages, n in zip(table, lens, strict=True):
            j = torch.arange(n)
            seen[pages[j // case.page].long(), j % case.page] = True
    else:
        k, v = (randn((len(new), max(lens) + 50, case.kv_heads, case.dim), case.dtype, g) for _ in "kv")
        seen = torch.arange(k.shape[1]) < torch.tensor(lens).unsqueeze(1)
    for cache in (k, v):
        cache[~seen.to(device)] = torch.nan
    q = randn((*rows, case.heads, case.dim), case.dtype, g)
    return AttentionArgs(q, k, v, case.dim**-0.5, seqused_k=used, **options)


def attend(args: AttentionArgs, splits: int) -> tuple[Tensor, Tensor]:
    from attention_backend.kernels import flash_fwd_sm90, flash_merge

    partial_out, partial_lse = flash_fwd_sm90.forward_partials(replace(args, sinks=None), splits)
    rows = args.q.shape[0] if args.q.dim() == 3 else args.q.shape[0] * args.q.shape[1]
    assert partial_out.shape == (splits, rows, args.num_heads, args.head_dim_v)
    assert partial_lse.shape == (splits, *args.lse_shape)
    assert partial_out.is_contiguous()
    assert partial_out.dtype == partial_lse.dtype == torch.float32
    assert not partial_lse.isnan().any()
    out = args.q.new_empty(args.out_shape)
    lse = args.q.new_empty(args.lse_shape, dtype=torch.float32)
    flash_merge.merge(partial_out, partial_lse, out, lse, sinks=args.sinks)
    return out, lse


@pytest.fixture(scope="module", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    first_calls.run_all(request, Chunks, lambda case: attend(build(case, torch.device("cuda", 0)), 2))


@pytest.mark.gpu
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_split_keys_meet_the_error_rule(case: Chunks, splits: int, hopper: torch.device) -> None:
    args = build(case, hopper)
    with poisoned_memory():
        result = attend(args, splits)
    check(args, result)


RAGGED = (
    CASES[12],
    CASES[13],
    Chunks(((180, 30_000), (512, 0), (40, 9), (200, 0)), varlen=True, heads=32, kv_heads=8),
    Chunks(((240, 20_000), (240, 20_000)), varlen=True, heads=32, kv_heads=8, sinks=True),
)


@pytest.mark.gpu
@pytest.mark.parametrize("case", RAGGED, ids=str)
def test_parts_that_the_device_chooses_meet_the_error_rule(case: Chunks, hopper: torch.device) -> None:
    from attention_backend.kernels import flash_fwd_sm90

    args = build(case, hopper)
    with poisoned_memory():
        result = flash_fwd_sm90.forward(args)
    check(args, result)


#: The longest contexts that a GPU holds beside their float64 reference, up to a million keys.
LONG = (
    Chunks(((128, 1_048_448),), heads=4, kv_heads=1),
    Chunks(((512, 261_632),), heads=4, kv_heads=1),
    Chunks(((16_384, 49_152),), heads=1, kv_heads=1),
)


@pytest.mark.gpu
@pytest.mark.parametrize("case", LONG, ids=str)
def test_long_contexts_meet_the_error_rule(case: Chunks, hopper: torch.device) -> None:
    from attention_backend.kernels import flash_fwd_sm90

    args = build(case, hopper)
    with poisoned_memory():
        result = flash_fwd_sm90.forward(args)
    check(args, result)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [CASES[0], CASES[12]], ids=str)
def test_a_thousand_repeats_of_split_keys_are_bitwise_equal(case: Chunks, hopper: torch.device) -> None:
    args = build(case, hopper)
    want, want_lse = attend(args, 7)
    differing = torch.zeros((), dtype=torch.int64, device=hopper)
    for _ in range(1000):
        out, lse = attend(args, 7)
        differing += (out != want).any() | (lse != want_lse).any()
    assert int(differing) == 0


def replayed(args: AttentionArgs, work: Callable[[], Tensor], lengths: Sequence[int]) -> None:
    graph, out = captured(work)
    assert args.seqused_k is not None
    for length in lengths:
        args.seqused_k.fill_(length)
        graph.replay()
        assert torch.equal(out, work()), f"replay over {length} keys differs from a plain call"


@pytest.mark.gpu
def test_a_graph_of_a_split_chunk_follows_its_length(hopper: torch.device) -> None:
    from attention_backend.kernels import flash_fwd_sm90, flash_merge

    args = build(Chunks(((256, 12_000),)), hopper)

    def work(splits: int) -> Tensor:
        partials = flash_fwd_sm90.forward_partials(args, splits)
        out = args.q.new_empty(args.out_shape)
        flash_merge.merge(*partials, out, args.q.new_empty(args.lse_shape, dtype=torch.float32))
        return out

    for splits in (3, 7):
        replayed(args, partial(work, splits), (12_256, 256, 1000, 0, 5000))
