"""The kinds of the random tester that are one problem each: forward, backward, paged, decode, sparse; and their doors.

A kind takes two draws: of what is compiled, and of what is not.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attention_backend import attention_with_lse, block_patterns
from attention_backend.block_sparse import BlockSparsity
from attention_backend.problem import AttentionArgs
from attention_backend.reference import standard

from . import backward_oracle, error_rule, test_block_sparse
from .error_rule import assert_lse_close, assert_out_close, filled_memory, poisoned_memory
from .fuzz_draws import DENSE, PAGED, Draw, Place, draw_args, draw_case, refusals, within
from .public import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from .test_graphs import captured

Results = tuple[Tensor, Tensor]
Door = Callable[[AttentionArgs], Results]
_BY_WINDOW = ("window_left", "window_right")


def forward(fixed: Draw, free: Draw, place: Place) -> None:
    args = draw_args(draw_case(fixed, free, place), fixed, free, place)
    if fixed.chance(0.04):
        args = replace(args, **{name: getattr(args, name).float() for name in "qkv"})
    attend_twice(args, choose_door(args, free))


def paged(fixed: Draw, free: Draw, place: Place) -> None:
    case = draw_case(fixed, free, place, PAGED)
    args = draw_args(case, fixed, free, place)
    if new_keys(args, free):
        return
    attend_twice(args, choose_door(args, free))


def decode(fixed: Draw, free: Draw, place: Place) -> None:
    """Few rows over many keys, in pages and out of them; replays of a graph with other lengths."""
    longer, layouts = replace(place, longest=2 * place.longest), ("paged", "paged", "paged_varlen", "dense", "bhsd")
    case = draw_case(fixed, free, longer, layouts, free.choice((1, 1, 4, 9)))
    args = draw_args(case, fixed, free, place, dropout=0.0)
    if new_keys(args, free):
        return
    door = choose_door(args, free)
    attend_twice(args, door)
    if place.graphs and args.paged and args.seqused_k is not None and free.chance(0.3):
        replay(args, attention_with_lse, free)


def replay(args: AttentionArgs, door: Door, free: Draw) -> None:
    """A graph of the call, replayed with lengths up to its own, is the call with those lengths."""
    assert args.seqused_k is not None
    free.say("replayed")
    args = replace(args, seqused_k=args.seqused_k.clone())
    assert args.seqused_k is not None
    for cache in (args.k, args.v):
        cache.nan_to_num_(0.5)  # shorter ones see other keys
    longest = args.seqused_k.tolist()
    results: list[Tensor] = []

    def work() -> Tensor:
        results[:] = door(args)
        return results[0]

    graph, _ = captured(work)
    for _ in range(3):
        lens = [free.randint(0, n) for n in longest]
        if args.leftpad_k is not None:
            lens = [max(n, pad) for n, pad in zip(lens, args.leftpad_k.tolist(), strict=True)]
        args.seqused_k.copy_(torch.tensor(lens, dtype=torch.int32))
        results[0].fill_(torch.nan)
        graph.replay()
        once = results[0].clone()
        graph.replay()
        assert torch.equal(once, results[0]), "two replays differ"
        hold(args, (results[0], results[1]))


def attend_twice(args: AttentionArgs, door: Door) -> None:
    """Under the rule, and the same bits again."""
    with refusals(), filled_memory():
        results = door(args)
    again = door(args)
    hold(args, results)
    assert_same(results, again)


def hold(args: AttentionArgs, results: Results) -> None:
    out, lse = results
    assert (out.shape, out.dtype, lse.shape) == (args.out_shape, args.dtype, args.lse_shape)
    if not args.dropout_threshold:
        error_rule.check(args, results)
        return
    truth, truth_lse = standard.attention(args)
    assert_out_close(out, truth, standard.same_dtype(args), rtol=3.0 if args.softcap else 2.0)
    assert_lse_close(lse, truth_lse)


def assert_same(results: Results, again: Results) -> None:
    for name, x, y in zip(("out", "lse"), results, again, strict=True):
        assert torch.equal(x, y), f"{name} differs from call to call"


def choose_door(args: AttentionArgs, free: Draw) -> Door:
    """One of the public functions that can say all that the problem is."""
    doors: list[Door] = [attention_with_lse]
    plain = args.key_mask is None and args.mask_desc is None and args.bias is None and not args.dropout_threshold
    lengths, scaled = args.seqused_k is not None or args.leftpad_k is not None, args.k_scale is not None
    if plain and args.cu_seqlens_q is None:
        doors += [by_kvcache] * 3
        if not args.paged:
            doors.append(by_cache_rows)
        if not args.paged and not lengths and not args.num_splits:
            doors += [by_flash_attn] * 5
    elif plain and args.leftpad_k is None and args.num_splits == 0 and (args.paged or not lengths) and not scaled:
        doors += [by_varlen] * 5
    door = free.choice(doors)
    free.say(door.__name__)
    return door


def _options(args: AttentionArgs, names: tuple[str, ...]) -> dict[str, Any]:
    options = {name: getattr(args, name) for name in (*names, "softcap", "alibi_slopes", "sinks", "chunk_size")}
    return options | {"causal": args.window_right == 0, "window_size": (args.window_left, args.window_right)}


def by_flash_attn(args: AttentionArgs) -> Results:
    options = _options(args, ("softmax_scale", "deterministic"))
    out, lse, _ = flash_attn_func(args.q, args.k, args.v, return_attn_probs=True, **options)
    return out, lse


def by_varlen(args: AttentionArgs) -> Results:
    starts = args.cu_seqlens_k
    if starts is None:
        assert args.seqused_k is not None
        starts = torch.nn.functional.pad(args.seqused_k.cumsum(0), (1, 0)).to(torch.int32)
    out, lse, _ = flash_attn_varlen_func(
        args.q, args.k, args.v, args.cu_seqlens_q, starts, args.max_seqlen_q, args.max_seqlen_k,
        return_attn_probs=True, **_options(args, ("softmax_scale", "deterministic", "block_table")),
    )  # fmt: skip
    return out, lse


def by_kvcache(args: AttentionArgs, **new: Any) -> Results:
    options = _options(args, ("softmax_scale", "num_splits", "block_table", "k_scale", "v_scale"))
    options |= {"cache_leftpad": args.leftpad_k, "cache_seqlens": args.seqused_k} | new
    out, lse = flash_attn_with_kvcache(args.q, args.k, args.v, return_softmax_lse=True, **options)
    return out, lse


def by_cache_rows(args: AttentionArgs) -> Results:
    """`by_kvcache` of a larger cache, of which each sequence names its row."""
    batch = args.batch
    rows = torch.arange(batch + 2, device=args.q.device).flip(0)[1 : batch + 1]
    caches = [x.new_full((batch + 2, *x.shape[1:]), torch.nan) for x in (args.k, args.v)]
    for cache, x in zip(caches, (args.k, args.v), strict=True):
        cache[rows] = x
    return by_kvcache(replace(args, k=caches[0], v=caches[1]), cache_batch_idx=rows.to(torch.int32))


def new_keys(args: AttentionArgs, free: Draw) -> bool:
    """Where it can be said, sometimes: the last keys are not in the cache yet but stored by the call."""
    if args.seqused_k is None or choose_door(args, free) is not by_kvcache or free.chance(0.4):
        return False
    count = min(free.choice((1, 2, 5, 70, args.q.shape[1])), int(args.seqused_k.min()))
    if count == 0:
        return False
    free.say(f"{count} new keys")
    before = args.seqused_k - count
    at = before[:, None] + torch.arange(count, device=before.device)
    if args.block_table is None:
        slots = (torch.arange(args.batch, device=before.device)[:, None], at)
    else:
        slots = (args.block_table.long().gather(1, at // args.k.shape[1]), at % args.k.shape[1])
    k, v = args.k[slots], args.v[slots]
    caches = [x.clone(memory_format=torch.preserve_format) for x in (args.k, args.v)]
    for cache in caches:
        cache[slots] = torch.nan
    holding = replace(args, k=caches[0], v=caches[1])
    with refusals(), filled_memory():
        results = by_kvcache(holding, k=k, v=v, cache_seqlens=before)
    for stored, whole in ((holding.k, args.k), (holding.v, args.v)):
        assert torch.equal(stored.view(torch.int16), whole.view(torch.int16)), "the cache is not what was stored"
    hold(args, results)
    assert_same(results, by_kvcache(holding, k=k, v=v, cache_seqlens=before))
    return True


def backward(fixed: Draw, free: Draw, place: Place) -> None:
    """Gradients of one of the public functions by autograd."""
    layouts = ("paged_varlen",) if fixed.chance(0.04) else (*DENSE, "varlen", "varlen")
    deterministic = fixed.chance(0.4)
    smaller = replace(place, scores=place.scores // 2)
    args = draw_args(draw_case(fixed, free, smaller, layouts), fixed, free, place, dropout=0.2, profiles=False)
    args = replace(args, num_splits=0, deterministic=deterministic)
    names = [name for name in ("q", "k", "v", "sinks", "bias") if getattr(args, name) is not None]
    leaves = {name: getattr(args, name).detach().requires_grad_() for name in names}
    door = choose_door(args, free)
    door = attention_with_lse if door in (by_kvcache, by_cache_rows) else door
    with refusals(), filled_memory():
        out, lse = door(replace(args, **leaves))
    hold(args, (out.detach(), lse.detach()))
    grad_out = torch.randn(args.out_shape, device=args.q.device).to(args.dtype)
    if free.chance(0.2):  # as a transposition gives them
        grad_out = grad_out.transpose(-2, -3).contiguous().transpose(-2, -3)
    grad_lse = torch.randn(args.lse_shape, device=args.q.device) if fixed.chance(0.3) else None
    dead = (lse == -torch.inf).transpose(-1, -2)
    grad_out[dead] = torch.nan
    ends, grads = ([out], [grad_out]) if grad_lse is None else ([out, lse], [grad_out, grad_lse])
    free.say(f"deterministic={deterministic}, of lse={grad_lse is not None}")

    def gradients() -> dict[str, Tensor]:
        got = torch.autograd.grad(ends, list(leaves.values()), grads, retain_graph=True)
        return dict(zip(names, got, strict=True))

    with refusals(), poisoned_memory() if deterministic else filled_memory():
        got = gradients()
    hold_gradients(args, out.detach(), got, grad_out.masked_fill(dead.unsqueeze(-1), 0.0), grad_lse)
    if deterministic:
        again = gradients()
        for name in names:
            assert torch.equal(got[name], again[name]), f"d{name} differs from call to call"


def hold_gradients(
    args: AttentionArgs, out: Tensor, got: dict[str, Tensor], grad_out: Tensor, grad_lse: Tensor | None
) -> None:
    truth = backward_oracle.gradients(args, grad_out, grad_lse, out=out)
    same_dtype = backward_oracle.gradients(args, grad_out, grad_lse, args.dtype, reorder=True)
    # Queries may be louder than those of the tests, and many rows' noise is added up where they see few keys.
    largest = max([float(x.nan_to_num().abs().max()) for x in (args.q, args.k) if x.numel()], default=1.0)
    noise = backward_oracle.NOISE * max(1.0, largest / 8)
    rows = args.q.numel() // args.head_dim / args.num_kv_heads
    for name in ("q", "k", "v", "sinks", "bias"):
        allowed = noise * (max(1.0, rows**0.5 / 4) if name in ("k", "bias") else 1.0)
        if args.dropout_threshold:  # so outputs of one key are rounded as well, where plain torch has no error
            allowed += 2 * truth.of_rounding.get(f"d{name}", 0.0)
        with _named(name):
            backward_oracle.assert_close(args, f"d{name}", got.get(name), truth, same_dtype, allowed)


@contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"d{name}: {error}") from error


def sparse(fixed: Draw, free: Draw, place: Place) -> None:
    """Lists of blocks, of patterns or of nothing in particular."""
    device, kinds = place.device, ("causal", "window", "longformer", "prefix", "documents", "butterfly")
    dim, dim_v = fixed.head_dims()
    dtype = fixed.choice((torch.bfloat16, torch.float16))
    name, group = fixed.choice((*kinds, *["blocky"] * 6)), fixed.choice((1, 2, 4))
    batch, heads = (2, 4) if name != "blocky" else (free.choice((1, 2, 3)), group * free.choice((1, 2)))
    pair = (max(1, free.length(place.longest)), max(1, free.length(place.longest)))
    rows, keys = (max(2, n) for n in within(place.scores, batch * heads, [pair])[0])
    free.say(f"{name} {rows}x{keys} b{batch} h{heads}/{heads // group} d{dim}/{dim_v} {dtype}")
    if name == "blocky":
        lists = (free.choice((1, batch)), free.choice((1, heads)))
        sparsity: BlockSparsity = test_block_sparse.blocky((rows, keys), *lists, rows, keys, device)
    elif name == "window":
        window = (free.randint(0, keys), free.randint(0, 70))
        sparsity = block_patterns.sliding_window(rows, keys, window=window, device=device)
    else:
        sparsity = test_block_sparse.PATTERNS[name](rows, keys, device)
    shapes = ((rows, heads, dim), (keys, heads // group, dim), (keys, heads // group, dim_v))
    q, k, v = (torch.randn((batch, *shape), device=device).to(dtype) for shape in shapes)
    with refusals(), filled_memory():
        results = test_block_sparse.run(q, k, v, sparsity)
    test_block_sparse.check(q, k, v, sparsity)
    assert_same(results, test_block_sparse.run(q, k, v, sparsity))
