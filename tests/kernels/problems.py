"""Builds attention problems from a printable case: layouts, lengths, masks, options. Unseen key slots hold NaN.

A case is what a test's id shows; everything random in it (values, lengths, windows, page order) comes from the
session's seed and the case, so a failure is repeated by LONGWAVE_TEST_SEED and the test's id.
"""

import os
import secrets
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attention_backend.problem import DESC_COLUMNS, AttentionArgs

from . import oracle

SESSION_SEED = int(os.environ.get("LONGWAVE_TEST_SEED") or secrets.randbelow(1 << 31))

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LAYOUTS = ("dense", "bhsd", "padded", "varlen", "paged", "paged_varlen")
MASKS = ("full", "causal", "window", "sliding", "lookahead", "chunk")
SCORES = ("plain", "softcap", "alibi", "softcap_alibi")
KEYS = ("all", "seqused", "leftpad", "key_mask", "bias_float", "bias_element", "mask_desc")
_DENSE = ("dense", "bhsd", "padded")
_SOFTCAP = 15.0


@dataclass(frozen=True)
class Case:
    """One problem, before any tensor of it exists."""

    sq: int
    sk: int
    batch: int = 3
    heads: int = 6
    kv_heads: int = 2
    dim: int = 64
    dim_v: int = 64
    dtype: str = "bf16"
    layout: str = "dense"
    mask: str = "causal"
    score: str = "plain"
    keys: str = "all"
    sinks: bool = False
    page: int = 64
    hnd: bool = True  # pages in the engine's order [block, head, slot, dim] rather than FlashAttention's
    num_splits: int = 0
    q_lens: tuple[int, ...] = ()  # of varlen and pages, up to sq and sk; else they are random
    k_lens: tuple[int, ...] = ()

    def __str__(self) -> str:
        heads = f"h{self.heads}/{self.kv_heads}"
        page = f"{self.page}{'hnd' if self.hnd else 'nhd'}" if "paged" in self.layout else ""
        parts = [
            f"{self.sq}x{self.sk}", f"b{self.batch}", heads, f"d{self.dim}/{self.dim_v}", self.dtype,
            self.layout + page, self.mask, self.score, self.keys,
        ]  # fmt: skip
        parts += ["sinks"] * self.sinks + [f"splits{self.num_splits}"] * (self.num_splits > 0)
        return "-".join(parts + ["_".join(map(str, lens)) for lens in (self.q_lens, self.k_lens) if lens])

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def with_shape(self, sq: int, sk: int) -> "Case":
        return replace(self, sq=sq, sk=sk)


def possible(keys: str | None, layout: str | None, mask: str | None) -> bool:
    """Whether the three go together; None stands for any."""
    if keys in ("key_mask", "bias_float", "bias_element", "mask_desc") and layout not in (None, *_DENSE):
        return False
    if keys == "leftpad" and layout == "varlen":
        return False
    return not (keys == "mask_desc" and mask not in (None, "full"))  # a descriptor brings its own mask


def generator(case: object, device: torch.device) -> torch.Generator:
    seed = zlib.crc32(f"{SESSION_SEED} {case}".encode())
    return torch.Generator(device).manual_seed(seed)


def randn(shape: tuple[int, ...], dtype: torch.dtype, g: torch.Generator) -> Tensor:
    return torch.randn(shape, dtype=torch.float32, device=g.device, generator=g).to(dtype)


def build(case: Case, device: torch.device) -> AttentionArgs:
    """The problem of a case, random values throughout, NaN in every key and value slot that no row sees."""
    g = generator(case, device)
    host = generator(case, torch.device("cpu"))
    varlen = case.layout in ("varlen", "paged_varlen")
    q_lens = _lengths(case.q_lens, case.batch, case.sq, host) if varlen else [case.sq] * case.batch
    q_shape = (sum(q_lens),) if varlen else (case.batch, case.sq)
    q = _tensor((*q_shape, case.heads, case.dim), case, g)
    options: dict[str, Any] = _mask(case, host) | _score(case, g) | {"num_splits": case.num_splits}
    if varlen:
        options |= {"cu_seqlens_q": _cu(q_lens, device), "max_seqlen_q": case.sq}
    if case.layout == "varlen":
        k_lens = _lengths(case.k_lens, case.batch, case.sk, host)
        options |= {"cu_seqlens_k": _cu(k_lens, device), "max_seqlen_k": case.sk}
        k_shape: tuple[int, ...] = (sum(k_lens),)
    elif case.layout in ("paged", "paged_varlen"):
        return _poison_unseen(_paged(case, q, options, g, host))
    else:
        k_shape = (case.batch, case.sk)
    k = _tensor((*k_shape, case.kv_heads, case.dim), case, g)
    v = _tensor((*k_shape, case.kv_heads, case.dim_v), case, g)
    limits = k_lens if case.layout == "varlen" else [case.sk] * case.batch
    options |= _keys(case, limits, g, host)
    return _poison_unseen(AttentionArgs(_louder(q, case), k, v, case.dim**-0.5, **options))


def block_table(lens: list[int], page: int, num_blocks: int, g: torch.Generator) -> Tensor:
    """int32 [batch, max_blocks] of distinct blocks in random order; entries past a sequence's end are negative."""
    counts = [-(-n // page) for n in lens]
    order = torch.randperm(num_blocks, generator=g).to(torch.int32)
    assert sum(counts) <= num_blocks
    table = torch.full((len(lens), max(1, *counts)), -1, dtype=torch.int32)
    taken = 0
    for b, count in enumerate(counts):
        table[b, :count] = order[taken : taken + count]
        taken += count
    return table


def pool(
    num_blocks: int, page: int, heads: int, dim: int, dtype: torch.dtype, g: torch.Generator, *, hnd: bool
) -> Tensor:
    """A random pool `[num_blocks, page, heads, dim]`; with `hnd` a transposed view of the engine's memory order."""
    if hnd:
        return randn((num_blocks, heads, page, dim), dtype, g).transpose(1, 2)
    return randn((num_blocks, page, heads, dim), dtype, g)


def _paged(case: Case, q: Tensor, options: dict[str, Any], g: torch.Generator, host: torch.Generator) -> AttentionArgs:
    lens = _lengths(case.k_lens, case.batch, case.sk, host)
    num_blocks = sum(-(-n // case.page) for n in lens) + 3
    table = block_table(lens, case.page, num_blocks, host).to(q.device)
    k, v = (
        pool(num_blocks, case.page, case.kv_heads, dim, case.torch_dtype, g, hnd=case.hnd)
        for dim in (case.dim, case.dim_v)
    )
    options = options | {"block_table": table, "max_seqlen_k": case.sk}
    options |= {"seqused_k": torch.tensor(lens, dtype=torch.int32, device=q.device)}
    if case.keys == "leftpad":
        pads = [int(torch.randint(0, n + 1, (1,), generator=host)) for n in lens]
        options["leftpad_k"] = torch.tensor(pads, dtype=torch.int32, device=q.device)
    return AttentionArgs(_louder(q, case), k, v, case.dim**-0.5, **options)


def _tensor(shape: tuple[int, ...], case: Case, g: torch.Generator) -> Tensor:
    """Random values in the memory order of the case's layout."""
    if case.layout == "bhsd":
        b, s, h, d = shape
        return randn((b, h, s, d), case.torch_dtype, g).transpose(1, 2)
    if case.layout == "padded":
        # Rows lie 8 elements apart from their neighbours; a read past head_dim meets NaN.
        memory = torch.full((*shape[:-1], shape[-1] + 8), torch.nan, dtype=case.torch_dtype, device=g.device)
        memory[..., : shape[-1]] = randn(shape, case.torch_dtype, g)
        return memory[..., : shape[-1]]
    return randn(shape, case.torch_dtype, g)


def _louder(q: Tensor, case: Case) -> Tensor:
    """Scores that reach into the bend of softcap's tanh, as in FlashAttention's tests."""
    return q * (_SOFTCAP / 4) if "softcap" in case.score else q


def _lengths(given: tuple[int, ...], batch: int, longest: int, g: torch.Generator) -> list[int]:
    """Those that are given, or random lengths up to `longest`: the first is the longest, every fifth is zero."""
    if given:
        assert (len(given), max(given)) == (batch, longest)
        return list(given)
    lens = torch.randint(min(longest, max(1, longest // 3)), longest + 1, (batch,), generator=g).tolist()
    return [longest if b == 0 else 0 if b % 5 == 1 else n for b, n in enumerate(lens)]


def _cu(lens: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lens], dtype=torch.int64).cumsum(0).to(device=device, dtype=torch.int32)


def _mask(case: Case, g: torch.Generator) -> dict[str, Any]:
    left, right = (int(torch.randint(0, max(2, case.sk), (1,), generator=g)) for _ in range(2))
    return {
        "full": {},
        "causal": {"window_right": 0},
        "window": {"window_left": left, "window_right": right},
        "sliding": {"window_left": left, "window_right": 0},
        "lookahead": {"window_right": right},
        "chunk": {"window_right": 0, "chunk_size": left // 2 + 1},
    }[case.mask]


def _score(case: Case, g: torch.Generator) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if "softcap" in case.score:
        options["softcap"] = _SOFTCAP
    if "alibi" in case.score:
        per_batch = case.batch % 2 == 1
        shape = (case.batch, case.heads) if per_batch else (case.heads,)
        options["alibi_slopes"] = torch.rand(shape, device=g.device, generator=g) * 0.3
    if case.sinks:
        options["sinks"] = randn((case.heads,), case.torch_dtype, g)
    return options


def _keys(case: Case, limits: list[int], g: torch.Generator, host: torch.Generator) -> dict[str, Tensor]:
    device, batch = g.device, len(limits)

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def up_to(n: int) -> int:
        return int(torch.randint(0, n + 1, (1,), generator=host))

    used = [n if b == 0 else up_to(n) for b, n in enumerate(limits)]
    makers: dict[str, Callable[[], dict[str, Tensor]]] = {
        "all": dict,
        "seqused": lambda: {"seqused_k": ints(used)},
        "leftpad": lambda: {"seqused_k": ints(used), "leftpad_k": ints([up_to(n) for n in used])},
        "key_mask": lambda: {"key_mask": torch.rand((batch, case.sk), device=device, generator=g) < 0.7},
        "bias_float": lambda: {"bias": torch.randn((batch, case.heads, case.sq, case.sk), device=device, generator=g)},
        "bias_element": lambda: {"bias": randn((1, case.heads, 1, case.sk), case.torch_dtype, g)},
        "mask_desc": lambda: {"mask_desc": _descriptors(case, used, up_to).to(device)},
    }
    return makers[case.keys]()


def _descriptors(case: Case, stops: list[int], up_to: Callable[[int], int]) -> Tensor:
    """int32 [batch, 8]: a kind of mask per sequence, as a batch of left-padded prompts on a static cache has them."""
    table = torch.zeros((len(stops), DESC_COLUMNS), dtype=torch.int32)
    for b, stop in enumerate(stops):
        start = up_to(stop)
        offset = up_to(case.sk) - case.sq // 2
        left, right, chunk = [(-1, 0, 0), (up_to(case.sk), 0, 0), (-1, -1, 0), (-1, 0, 1 + up_to(case.sk))][b % 4]
        table[b, :6] = torch.tensor([start, stop, offset, left, right, chunk])
    return table


def _poison_unseen(args: AttentionArgs) -> AttentionArgs:
    """NaN into every slot of k and v that no row sees: free blocks, tails, padding, holes, keys outside all windows."""
    fill_unseen(args, torch.nan, torch.nan)
    return args


def seen_slots(args: AttentionArgs) -> Tensor:
    """bool, the shape of k without its last two dimensions: the slots that some row sees."""
    seen = torch.zeros(args.k.shape[:-2], dtype=torch.bool, device=args.k.device)
    for seq in oracle.sequences(args):
        slots = oracle.key_slots(args, seq.index)
        seen[slots] = seen[slots] | seq.visible.any(0)
    return seen


def fill_unseen(args: AttentionArgs, k_value: float, v_value: float) -> None:
    unseen = ~seen_slots(args)
    args.k[unseen] = k_value
    args.v[unseen] = v_value
