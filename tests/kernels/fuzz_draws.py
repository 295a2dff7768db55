"""What the random tester draws its problems from: lengths, head dims, cases, and what a case says nothing about."""

import random
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention_backend import UnsupportedError
from attention_backend.problem import AttentionArgs

from .problems import KEYS, LAYOUTS, MASKS, Case, build, fill_unseen, possible
from .test_levels import PROFILES, shaped

_PRIMES = (3, 7, 13, 31, 61, 97, 127, 211, 257, 383, 509, 641, 773, 1021, 1531, 2039, 3067, 4093, 8191)
_TILES = (8, 16, 32, 48, 64, 80, 96, 112, 128, 144, 176, 192, 256)
_USUAL_DIMS = (64, 128, 256)
_GROUPS = (1, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
DENSE = ("dense", "bhsd", "padded")
PAGED = ("paged", "paged_varlen")
PAGES = (16, 16, 32, 48, 64, 64, 64, 80, 128, 256)


class RefusedError(Exception):
    """The library says that it does not serve the problem."""


@contextmanager
def refusals() -> Iterator[None]:
    """Around calls of the library alone, whose refusals are not failures."""
    try:
        yield
    except UnsupportedError as error:
        raise RefusedError(str(error)) from error
    except ValueError as error:
        if not _raised_by_us(error):
            raise
        raise RefusedError(str(error)) from error


def _raised_by_us(error: ValueError) -> bool:
    """Whether a line of the library says it: those of Python and torch themselves are faults."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return (last.line or "").startswith("raise ") and "attention_backend" in Path(last.filename).parts


@dataclass(frozen=True)
class Place:
    """Where problems run, and how large they may be there."""

    device: torch.device
    scores: int  # of a problem, all heads and sequences together
    longest: int  # rows or keys of a sequence
    graphs: bool = False  # whether there are CUDA graphs


class Draw(random.Random):
    """Random choices, the same for the same seed. `said` is what a failure prints."""

    def __init__(self, seed: str) -> None:
        super().__init__(seed)
        self.said: list[str] = []

    def say(self, what: object) -> None:
        self.said.append(str(what))

    def chance(self, p: float) -> bool:
        return self.random() < p

    def length(self, longest: int) -> int:
        """Nothing, one, a few, neighbours of tiles' edges, primes, anything."""
        kind = self.random()
        if kind < 0.1:
            n = int(kind > 0.03)
        elif kind < 0.2:
            n = self.randint(2, 17)
        elif kind < 0.6:
            tile = self.choice(_TILES)
            n = tile * self.randint(1, max(1, self.randint(1, max(1, longest // tile)))) + self.choice((-1, 0, 0, 1))
        elif kind < 0.75:
            n = self.choice([p for p in _PRIMES if p <= longest] or [longest])
        else:
            n = self.randint(min(1, longest), longest)
        return min(n, longest)

    def head_dims(self, multiple: int = 8, most: int = 256) -> tuple[int, int]:
        """Of keys and of values."""
        dims = [d for d in _USUAL_DIMS if d <= most]
        dim = self.choice(dims) if self.chance(0.5) else multiple * self.randint(-(-16 // multiple), most // multiple)
        if self.chance(0.8):
            return dim, dim
        return dim, multiple * self.randint(-(-16 // multiple), most // multiple)

    def group(self, most: int = 16) -> int:
        return self.choice([g for g in _GROUPS if g <= most])

    def splits(self) -> int:
        return self.choice((0, 0, 0, 1, 2, 3, 7, 40))


def within(scores: int, heads: int, lengths: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(rows, keys) of each sequence, the longest halved until all their scores are few enough."""
    fitting = [list(pair) for pair in lengths]
    while heads * sum(max(16, rows) * keys for rows, keys in fitting) > scores:
        longest = max(fitting, key=lambda pair: max(16, pair[0]) * pair[1])
        longest[int(longest[1] >= longest[0])] //= 2
    return [(rows, keys) for rows, keys in fitting]


def draw_case(
    fixed: Draw,
    free: Draw,
    place: Place,
    layouts: Sequence[str] = LAYOUTS,
    most_rows: int = 0,
    *,
    multiple: int = 8,
) -> Case:
    """Of compile-time options from `fixed`, of a shape from `free`. `most_rows`: of a sequence, if not 0; `multiple`:
    of head dims."""
    dim, dim_v = fixed.head_dims(multiple)
    layout, mask, group = fixed.choice(layouts), fixed.choice(MASKS), fixed.group()
    keys = fixed.choice([*["all"] * 6, *KEYS])
    if not possible(keys, layout, mask):
        keys, mask = ("all", mask) if keys != "mask_desc" or layout not in DENSE else (keys, "full")
    options: dict[str, Any] = {
        "dtype": fixed.choice(("bf16", "bf16", "fp16")),
        "score": fixed.choice((*["plain"] * 5, "softcap", "alibi", "softcap_alibi")),
        "sinks": fixed.chance(0.25),
        "page": fixed.choice(PAGES) if fixed.chance(0.93) else fixed.choice((1, 8, 24, 100)),
        "hnd": fixed.chance(0.6),
    }
    kv_heads = free.choice((1, 1, 2, 3, 4)) if group < 8 else free.choice((1, 1, 2))
    ragged, dense_rows = layout in ("varlen", *PAGED), layout in (*DENSE, "paged")
    batch = free.choice((1, 2, 3, 5, 9, 20)) if ragged else free.choice((1, 1, 2, 3))
    square = mask in ("causal", "sliding") and free.chance(0.4)
    longest_rows = min(place.longest, most_rows or place.longest)
    pairs = [(free.length(longest_rows), free.length(place.longest)) for _ in range(batch)]
    if square and not most_rows:
        pairs = [(keys_of, keys_of) for _, keys_of in pairs]
    if dense_rows:
        pairs = [(pairs[0][0], keys_of if ragged else pairs[0][1]) for _, keys_of in pairs]
    pairs = within(place.scores, kv_heads * group, pairs)
    if dense_rows:  # as short as the shortest became
        rows = min(n for n, _ in pairs)
        pairs = [(rows, n if ragged else min(k for _, k in pairs)) for _, n in pairs]
    q_lens, k_lens = (tuple(pair[i] for pair in pairs) for i in range(2))
    if ragged:
        options |= {"q_lens": () if dense_rows else q_lens, "k_lens": k_lens}
    return Case(
        max(q_lens), max(k_lens), batch, kv_heads * group, kv_heads, dim, dim_v, layout=layout, mask=mask, keys=keys,
        num_splits=free.splits(), **options,
    )  # fmt: skip


def draw_args(
    case: Case, fixed: Draw, free: Draw, place: Place, *, dropout: float = 0.12, profiles: bool = True
) -> AttentionArgs:
    """The case's problem, with what a case does not have: NaN in every slot out of sight."""
    args = build(case, place.device)
    free.say(case)
    changes = dict(_changed_scores(args, fixed, free)) | dict(_changed_masks(args, case, fixed, free))
    if fixed.chance(dropout):
        seed = torch.randint(-(2**62), 2**62, (2,), device=place.device)
        changes |= {"dropout_p": free.choice((1 / 256, 0.1, 0.5, 0.9)), "dropout_seed": seed}
    free.say(", ".join(f"{name}={_shown(value)}" for name, value in changes.items()))
    args = replace(args, **changes)
    if profiles and fixed.chance(0.08) and case.layout in DENSE and case.score == "plain" and case.sk > 1 and case.sq:
        profile = free.choice(list(PROFILES))
        free.say(profile)
        args = shaped(args, profile)
    for x in (args.k, args.v):  # what the case's mask hides, the changed one may show
        x.copy_(torch.where(x.isnan(), torch.randn(x.shape, device=x.device).to(x.dtype), x))
    fill_unseen(args, torch.nan, torch.nan)
    return args


def _changed_scores(args: AttentionArgs, fixed: Draw, free: Draw) -> Iterator[tuple[str, Any]]:
    if free.chance(0.2):
        yield "softmax_scale", args.softmax_scale * free.uniform(0.3, 2.0)
    if args.softcap:
        yield "softcap", free.choice((5.0, 15.0, 30.0, 50.0))
    if args.sinks is not None and fixed.chance(0.5):
        yield "sinks", args.sinks.float() * free.choice((1.0, 4.0))
    if args.bias is not None:
        one = [slice(0, 1) if free.chance(0.3) else slice(None) for _ in range(3)]
        yield "bias", args.bias[one[0], one[1], one[2]].clone()
    if not args.softcap and free.chance(0.15):
        yield "q", args.q * free.choice((4.0, 30.0))


def _changed_masks(args: AttentionArgs, case: Case, fixed: Draw, free: Draw) -> Iterator[tuple[str, Any]]:
    if free.chance(0.3):  # narrow ones
        for name in ("window_left", "window_right"):
            if getattr(args, name) > 0:
                yield name, free.randint(0, 9)
        if args.chunk_size:
            yield "chunk_size", free.choice((1, 2, 16, 64, 65))
    longest_k = args.max_seqlen_k
    if longest_k:  # an upper bound is allowed
        more = free.choice((0, 0, 1, 77))
        longest_k += more
        if args.block_table is not None:
            longest_k = min(longest_k, args.block_table.shape[1] * args.k.shape[1])
        yield "max_seqlen_k", longest_k
    if args.max_seqlen_q and free.chance(0.2):
        yield "max_seqlen_q", args.max_seqlen_q + free.choice((1, 70))
    if fixed.chance(0.1) and case.layout not in DENSE:
        width = longest_k if args.block_table is None else args.block_table.shape[1] * args.k.shape[1]
        yield "key_mask", torch.rand((args.batch, width), device=args.q.device) < 0.7


def _shown(x: object) -> object:
    return list(x.shape) if isinstance(x, Tensor) else x
