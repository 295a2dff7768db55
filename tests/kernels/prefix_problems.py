"""Builds shared-prefix problems, and their truth: plain attention over each request's joined keys.

Every cache slot that no row may see holds NaN: free pages, tails of pages, what comes after a prefix in its last page.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attention_backend import shared_prefix
from attention_backend.problem import AttentionArgs
from attention_backend.shared_prefix import PrefixGroups

from . import oracle
from .error_rule import assert_lse_close, assert_out_close, poisoned_memory
from .problems import block_table, generator, pool, randn

# Loosely typed: what they return depends on return_lse.
cascade_attention: Callable[..., Any] = shared_prefix.cascade_attention
shared_prefix_attention: Callable[..., Any] = shared_prefix.shared_prefix_attention


@dataclass(frozen=True)
class Level:
    """Of each group, how many requests it has and how many keys they share."""

    requests: tuple[int, ...]
    lens: tuple[int, ...]


@dataclass(frozen=True)
class PrefixCase:
    """One problem, before any tensor of it exists."""

    suffix_lens: tuple[int, ...]
    levels: tuple[Level, ...]
    rows: int = 1
    heads: int = 8
    kv_heads: int = 2
    dim: int = 128
    page: int = 64
    dtype: torch.dtype = torch.bfloat16
    sinks: bool = False
    softcap: float = 0.0
    hnd: bool = True

    def __str__(self) -> str:
        levels = "+".join("_".join(map(str, level.lens)) for level in self.levels)
        flags = ["sinks"] * self.sinks + ["softcap"] * (self.softcap > 0)
        name = f"{levels}x{len(self.suffix_lens)}-r{self.rows}-h{self.heads}/{self.kv_heads}-d{self.dim}-p{self.page}"
        return "-".join([name, str(self.dtype).removeprefix("torch."), *flags])


@dataclass
class PrefixProblem:
    """Tensors of a case; `suffix` and the tables of `prefixes` have room for longer lengths of later replays."""

    case: PrefixCase
    q: Tensor
    k: Tensor
    v: Tensor
    prefixes: list[PrefixGroups]
    suffix: Tensor
    suffix_lens: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def attend(self) -> tuple[Tensor, Tensor]:
        out, lse = cascade_attention(
            self.q,
            self.k,
            self.v,
            self.prefixes,
            suffix_block_table=self.suffix,
            suffix_lens=self.suffix_lens,
            return_lse=True,
            **self.options,
        )
        return out, lse


def one_prefix(length: int, suffix_lens: tuple[int, ...], **options: Any) -> PrefixCase:
    return PrefixCase(suffix_lens, (Level((len(suffix_lens),), (length,)),), **options)


def build(case: PrefixCase, device: torch.device) -> PrefixProblem:
    g, host = generator(case, device), generator(case, torch.device("cpu"))
    lens = [n for level in case.levels for n in level.lens] + list(case.suffix_lens)
    num_blocks = sum(-(-n // case.page) for n in lens) + 2
    table = block_table(lens, case.page, num_blocks, host)
    k, v = (pool(num_blocks, case.page, case.kv_heads, case.dim, case.dtype, g, hnd=case.hnd) for _ in "kv")
    seen = torch.zeros((num_blocks, case.page), dtype=torch.bool)
    for pages, n in zip(table, lens, strict=True):
        j = torch.arange(n)
        seen[pages[j // case.page].long(), j % case.page] = True
    for cache in (k, v):
        cache[~seen.to(device)] = torch.nan
    q = randn((len(case.suffix_lens), case.rows, case.heads, case.dim), case.dtype, g)
    prefixes, first = [], 0
    for level in case.levels:
        groups = len(level.lens)
        counts = torch.tensor([0, *level.requests]) * case.rows
        prefixes.append(
            PrefixGroups(
                _trimmed(table[first : first + groups]).to(device),
                torch.tensor(level.lens, dtype=torch.int32, device=device),
                counts.cumsum(0).to(device=device, dtype=torch.int32) if groups > 1 else None,
                int(counts.max()) if groups > 1 else 0,
            )
        )
        first += groups
    options: dict[str, Any] = {"softcap": case.softcap}
    if case.sinks:
        options["sinks"] = randn((case.heads,), case.dtype, g)
    if case.softcap:
        q = q * (case.softcap / 4)
    suffix_lens = torch.tensor(case.suffix_lens, dtype=torch.int32, device=device)
    return PrefixProblem(case, q, k, v, prefixes, _trimmed(table[first:]).to(device), suffix_lens, options)


def check(problem: PrefixProblem) -> None:
    """Runs the problem with poisoned memory and holds out and lse to the error rule."""
    with poisoned_memory():
        out, lse = problem.attend()
    assert_meets_the_rule(problem, out, lse)


def assert_meets_the_rule(problem: PrefixProblem, out: Tensor, lse: Tensor) -> None:
    truth, truth_lse = attention(problem)
    same_dtype, _ = attention(problem, problem.case.dtype, reorder=True)
    assert out.shape == problem.q.shape
    assert out.dtype == problem.q.dtype
    assert_out_close(out, truth, same_dtype, rtol=3.0 if problem.case.softcap else 2.0)
    assert_lse_close(lse, truth_lse)


def attention(
    problem: PrefixProblem, dtype: torch.dtype | None = None, *, reorder: bool = False
) -> tuple[Tensor, Tensor]:
    """(out `[requests, rows, heads, dim]`, lse `[requests, heads, rows]`) as `oracle.attention` computes them."""
    results = [
        [oracle.attention(args, dtype, reorder=reorder) for args in request] for request in joined_requests(problem)
    ]
    outs = torch.cat([torch.cat([out for out, _ in request], 1) for request in results])
    return outs, torch.cat([torch.cat([lse for _, lse in request], 2) for request in results])


def joined_requests(problem: PrefixProblem) -> Iterator[list[AttentionArgs]]:
    """Each request as plain problems over its joined keys: one, or one a row where rows precede its suffix."""
    rows, own = problem.q.shape[1], problem.suffix_lens.tolist()
    for r in range(problem.q.shape[0]):
        parts = []
        for level in problem.prefixes:
            group = 0 if level.cu_rows is None else int((level.cu_rows[1:] <= r * rows).sum())
            parts.append((level.block_table[group], int(level.lens[group])))
        whole = _joined(problem, [*parts, (problem.suffix[r], own[r])])
        if own[r] >= rows:
            yield [_plain(problem, problem.q[r : r + 1], whole)]
            continue
        shared = whole[0].shape[0] - own[r]
        counts = [shared + max(0, own[r] - rows + t + 1) for t in range(rows)]
        yield [
            _plain(problem, problem.q[r : r + 1, t : t + 1], (whole[0][:n], whole[1][:n])) for t, n in enumerate(counts)
        ]


def _joined(problem: PrefixProblem, parts: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    page = problem.k.shape[1]
    pages = [table[: -(-n // page)].long() for table, n in parts]
    lengths = [n for _, n in parts]
    k, v = (
        torch.cat([cache[p].flatten(0, 1)[:n] for p, n in zip(pages, lengths, strict=True)])
        for cache in (problem.k, problem.v)
    )
    return k, v


def _plain(problem: PrefixProblem, q: Tensor, keys: tuple[Tensor, Tensor]) -> AttentionArgs:
    k, v = (x.unsqueeze(0) for x in keys)
    return AttentionArgs(q, k, v, q.shape[-1] ** -0.5, window_right=0, **problem.options)


def _trimmed(table: Tensor) -> Tensor:
    """Without the columns that no row of it uses."""
    return table[:, : int((table >= 0).sum(1).max())].contiguous()
