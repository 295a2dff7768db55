"""The kinds of the random tester that are several problems at once: steps of an engine, cascades; and float8 ones.

A kind takes two draws: of what is compiled, and of what is not.
"""

from dataclasses import replace
from typing import Any

import torch

from attention_backend.problem import AttentionArgs

from . import oracle, prefix_problems, test_fp8_forward, test_fp8_pages
from .error_rule import assert_lse_close, assert_out_close, check, filled_memory
from .fuzz_calls import assert_same, choose_door
from .fuzz_draws import PAGED, PAGES, Draw, Place, draw_args, draw_case, refusals, within
from .prefix_problems import Level, PrefixCase, PrefixProblem
from .test_fp8_kv import dequantised
from .test_fp8_prefill import rounded
from .test_graphs import captured
from .test_paged_attention import Step, _lse_of, step, with_missing_decodes

_DTYPES = (torch.bfloat16, torch.float16)


def chunks(fixed: Draw, free: Draw, place: Place) -> None:
    """Decodes and chunks together, stored and attended; some decodes missing; graphs with other lengths."""
    dim, dim_v = fixed.head_dims()
    problem = _step(fixed, free, place, {"dim": dim, "dim_v": dim_v, "page": fixed.choice(PAGES)})
    options, scale = _layer(fixed, free, problem), dim**-0.5
    args = replace(problem.args(), softmax_scale=scale, **options)
    whole = problem
    rows_of_chunks = problem.q.shape[0] - problem.metadata.num_decodes  # decodes that are missing have room there
    missing = min(free.choice((0, 0, 1, 30)), rows_of_chunks)
    if missing:
        free.say(f"{missing} missing")
        problem = replace(problem, metadata=with_missing_decodes(problem.metadata, missing))
    with refusals(), filled_memory():
        out = problem.attend(**options)
    slots, page = problem.metadata.slot_mapping, problem.k_cache.shape[2]
    for cache, new in ((problem.k_cache, problem.k), (problem.v_cache, problem.v)):
        assert torch.equal(cache[slots // page, :, slots % page], new), "the pages are not what was stored"
    lse = _lse_of(args)
    check(args, (out, lse))
    again = problem.attend(**options)
    assert torch.equal(out, again), "out differs from call to call"
    stored = replace(problem, k=None, v=None)  # type: ignore[arg-type]
    assert torch.equal(out, stored.attend(**options)), "out differs where keys are in their pages already"
    if place.graphs and free.chance(0.4):
        replay_step(whole, options, free)


def _step(fixed: Draw, free: Draw, place: Place, options: dict[str, Any]) -> Step:
    group, dtype = fixed.group(), fixed.choice(_DTYPES)
    kv_heads = free.choice((1, 2, 3))
    few = free.choice((0, 1, 2, 5, 24))
    many = free.choice((0, 1, 1, 2, 3)) if few else free.choice((1, 2, 3))
    pairs = [(1, free.length(place.longest)) for _ in range(few)]
    pairs += [(max(2, free.length(place.longest // 2)), free.length(place.longest)) for _ in range(many)]
    batch = [
        (1 if i < few else max(2, rows), prefix)
        for i, (rows, prefix) in enumerate(within(place.scores // 2, kv_heads * group, pairs))
    ]
    free.say(f"{batch} h{kv_heads * group}/{kv_heads} {dtype} {options}")
    return step(batch, place.device, heads=kv_heads * group, kv_heads=kv_heads, dtype=dtype, **options)


def _layer(fixed: Draw, free: Draw, problem: Step) -> dict[str, Any]:
    options: dict[str, Any] = {}
    kind = fixed.choice(("", "", "", "window", "chunk"))
    if kind:
        value = free.choice((1, 15, 64, 100, 777))
        options["window_left" if kind == "window" else "chunk_size"] = value
    if fixed.chance(0.15):
        options["softcap"] = free.choice((5.0, 30.0))
    free.say(options)
    if fixed.chance(0.25):
        free.say("sinks")
        options["sinks"] = torch.randn(problem.q.shape[1], device=problem.q.device).to(problem.q.dtype)
    return options


def replay_step(problem: Step, options: dict[str, Any], free: Draw) -> None:
    """A graph of the step follows its lengths, and is the plain step with them."""
    free.say("replayed")
    meta = problem.metadata
    rows, longest = meta.cu_seqlens_q.diff().tolist(), meta.seq_lens.tolist()
    graph, out = captured(lambda: problem.attend(**options))
    for _ in range(3):
        lens = [free.randint(n, most) for n, most in zip(rows, longest, strict=True)]
        meta.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        out.fill_(torch.nan)
        graph.replay()
        once = out.clone()
        graph.replay()
        assert torch.equal(once, out), "two replays differ"
        args = replace(problem.args(), **options)
        check(args, (out, _lse_of(args)))
        assert torch.equal(once, problem.attend(**options)), "a replay is not the plain step"


def cascade(fixed: Draw, free: Draw, place: Place) -> None:
    if fixed.chance(0.4):
        shared_step(fixed, free, place)
    else:
        levels_of_prefixes(fixed, free, place)


def levels_of_prefixes(fixed: Draw, free: Draw, place: Place) -> None:
    """Requests in groups, level by level, that share a prefix each; graphs with other lengths."""
    dim, group = fixed.head_dims()[0], fixed.group()
    kv_heads, rows = free.choice((1, 2, 3)), free.choice((1, 1, 1, 2, 5, 33))
    requests, depth = free.choice((1, 2, 5, 17, 40)), free.choice((1, 1, 2, 3, 6))
    cuts = [sorted(free.sample(range(1, requests), free.randint(0, min(3, requests - 1)))) for _ in range(depth)]
    groups = [tuple(b - a for a, b in zip([0, *cut], [*cut, requests], strict=True)) for cut in cuts]
    lens = [tuple(free.length(place.longest) for _ in level) for level in groups]
    suffixes = tuple(free.length(place.longest // 2) for _ in range(requests))
    heads = kv_heads * group
    while heads * rows * sum(suffixes) > place.scores // 4:
        suffixes = tuple(n // 2 for n in suffixes)
    while heads * rows * sum(n * k for a, b in zip(groups, lens, strict=True) for n, k in zip(a, b, strict=True)) > (
        place.scores // 2
    ):
        lens = [tuple(n // 2 for n in level) for level in lens]
    case = PrefixCase(
        suffixes, tuple(Level(*pair) for pair in zip(groups, lens, strict=True)), rows, heads, kv_heads, dim,
        fixed.choice(PAGES), fixed.choice(_DTYPES), fixed.chance(0.25), 15.0 * fixed.chance(0.15), fixed.chance(0.6),
    )  # fmt: skip
    free.say(case)
    free.say(f"groups {groups}, own {suffixes}")
    problem = prefix_problems.build(case, place.device)
    with refusals(), filled_memory():
        out, lse = problem.attend()
    prefix_problems.assert_meets_the_rule(problem, out, lse)
    assert_same((out, lse), problem.attend())
    if place.graphs and free.chance(0.4):
        replay_prefixes(problem, free)


def replay_prefixes(problem: PrefixProblem, free: Draw) -> None:
    free.say("replayed")
    for cache in (problem.k, problem.v):
        cache.nan_to_num_(0.5)  # shorter ones see other keys
    lengths = [*(level.lens for level in problem.prefixes), problem.suffix_lens]
    longest = [x.tolist() for x in lengths]
    results: list[torch.Tensor] = []

    def work() -> torch.Tensor:
        results[:] = problem.attend()
        return results[0]

    graph, _ = captured(work)
    for _ in range(3):
        for x, most in zip(lengths, longest, strict=True):
            x.copy_(torch.tensor([free.randint(0, n) for n in most], dtype=torch.int32))
        results[0].fill_(torch.nan)
        graph.replay()
        once = results[0].clone()
        graph.replay()
        assert torch.equal(once, results[0]), "two replays differ"
        prefix_problems.assert_meets_the_rule(problem, results[0], results[1])


def shared_step(fixed: Draw, free: Draw, place: Place) -> None:
    """A step of the engine whose decodes, or chunks, begin with the same pages."""
    from . import test_shared_pages as shared_pages  # imports models

    dim, group, kv_heads = fixed.choice((64, 96, 128, 256)), fixed.group(), free.choice((1, 2))
    most = max(1, min(shared_pages.DOCUMENT, place.longest // shared_pages.PAGE))
    few, many = free.choice(((2, 0), (5, 0), (20, 0), (3, 1), (20, 3), (0, 2), (1, 3)))
    new = (*[1] * few, *(free.choice((2, 7, 60, 65)) for _ in range(many)))
    budget = place.scores // 2
    heads = kv_heads * group
    while most > 1 and heads * sum(max(16, n) for n in new) * 2 * most * shared_pages.PAGE > budget:
        most //= 2
    parts = [_shared(count, most, free) for count in (few, many)]
    shared = (*parts[0][0], *parts[1][0])
    own = tuple(n + free.length(most * shared_pages.PAGE) for n in new)
    case = shared_pages.Sharing(new, shared, own, parts[0][1], parts[1][1])
    free.say(f"{case} h{heads}/{kv_heads} d{dim}")
    problem = shared_pages.with_sharing(shared_pages.build(case, place.device, heads, kv_heads, dim), case)
    options: dict[str, Any] = {"softcap": 15.0} if fixed.chance(0.15) else {}
    if fixed.chance(0.25):
        options["sinks"] = torch.randn(heads, device=place.device)
    with refusals(), filled_memory():
        out = problem.attend(**options)
    args = replace(problem.args(), **options)
    check(args, (out, _lse_of(args)))
    assert torch.equal(out, problem.attend(**options)), "out differs from call to call"


def _shared(count: int, most: int, free: Draw) -> tuple[tuple[int, ...], Any]:
    """Of each sequence the pages that it begins with, fewer and fewer; and runs of those that share some."""
    from models.shared_runs import SharedRun

    shared = tuple(sorted((free.randint(0, most) for _ in range(count)), reverse=True))
    sharing = sum(n > 0 for n in shared)
    if sharing < 2:
        return shared, ()
    end = free.randint(2, sharing)
    stop = free.randint(1, shared[end - 1])
    first: list[SharedRun] = [SharedRun(0, end, 0, stop)]
    second: list[tuple[SharedRun, ...]] = []
    if sharing - end >= 2 and free.chance(0.5):
        first.append(SharedRun(end, sharing, 0, shared[sharing - 1]))
    deeper = sum(n > stop for n in shared[:end])
    if deeper >= 2 and free.chance(0.6):
        inner = free.randint(2, deeper)
        second.append((SharedRun(0, inner, stop, free.randint(stop + 1, shared[inner - 1])),))
    return shared, (tuple(first), *second)


def fp8(fixed: Draw, free: Draw, place: Place) -> None:
    {"forward": fp8_forward, "pages": fp8_pages, "step": fp8_step}[fixed.choice(("forward", "pages", "pages", "step"))](
        fixed, free, place
    )


def fp8_forward(fixed: Draw, free: Draw, place: Place) -> None:
    """flash_attn_fp8_func beside its emulation and float64."""
    dim, causal, hadamard = fixed.choice((64, 128, 256)), fixed.chance(0.5), fixed.chance(0.7)
    kv_heads, group = free.choice((1, 2)), free.choice((1, 2, 3, 8))
    heads = (kv_heads * group, kv_heads)
    pair = (free.length(place.longest), free.length(place.longest))
    rows, keys = (max(1, n) for n in within(place.scores // 2, 2 * heads[0], [pair])[0])
    free.say(f"fp8 {rows}x{keys} h{heads} d{dim} causal={causal} hadamard={hadamard}")
    dtype = fixed.choice(_DTYPES)
    x = test_fp8_forward.problem("fuzz", rows, keys, dim, heads=heads, dtype=dtype, device=place.device)
    with refusals():
        results = test_fp8_forward.public(x, causal=causal, hadamard=hadamard)
    if causal and rows > keys and keys == 1 and rows * dim < 4096:
        return  # of one row that sees one key there is no statistic
    test_fp8_forward.check(x, causal=causal, hadamard=hadamard)
    assert_same(results, test_fp8_forward.public(x, causal=causal, hadamard=hadamard))


def fp8_pages(fixed: Draw, free: Draw, place: Place) -> None:
    """Pages of e4m3 with scales, many rows or few, as attention over what they stand for."""
    most_rows = 0 if fixed.chance(0.6) else free.choice((1, 4))
    case = draw_case(fixed, free, place, PAGED, most_rows, multiple=16)
    args: AttentionArgs = rounded(draw_args(case, fixed, free, place, dropout=0.0))
    door = choose_door(args, free)
    with refusals(), filled_memory():
        out, lse = door(args)
    truth, truth_lse = oracle.attention(dequantised(args, torch.float64))
    same_dtype, _ = oracle.attention(dequantised(args, args.dtype), args.dtype, reorder=True)
    assert out.dtype == args.dtype
    assert_out_close(out, truth, same_dtype, rtol=3.0 if args.softcap else 2.0)
    assert_lse_close(lse, truth_lse)
    assert_same((out, lse), door(args))


def fp8_step(fixed: Draw, free: Draw, place: Place) -> None:
    """paged_attention that rounds new keys and values into pages of e4m3."""
    dim, _ = fixed.head_dims(16)
    problem = _step(fixed, free, place, {"dim": dim, "page": fixed.choice(PAGES)})
    with refusals():
        test_fp8_pages.check_step(problem)
