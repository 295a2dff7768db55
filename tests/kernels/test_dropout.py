"""Dropout in the kernels: the mask of the reference, results under the error rule, seeds and CUDA graphs."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention_backend import attention, dispatch
from attention_backend.problem import AttentionArgs
from attention_backend.reference import standard
from attention_backend.reference.dropout import keep_mask

from .error_rule import assert_lse_close, assert_out_close, kernels_for, run
from .problems import Case, build, generator, randn
from .public import flash_attn_func
from .test_graphs import captured

SHAPES = (
    *(
        Case(300, 555, dim=dim, dim_v=dim, mask=mask, dtype=dtype)
        for dim, dtype in ((64, "bf16"), (128, "fp16"), (256, "bf16"))
        for mask in ("full", "causal")
    ),
    Case(257, 513, layout="varlen", dim=128, dim_v=128, batch=4),
    Case(130, 1025, layout="paged_varlen", dim=64, dim_v=64, sinks=True),
    Case(200, 300, dim=128, dim_v=128, heads=8, kv_heads=8, mask="sliding", keys="seqused"),
    Case(5, 700, dim=128, dim_v=128, heads=4, kv_heads=2, mask="causal"),
    Case(65, 129, dim=72, dim_v=40, score="softcap_alibi", keys="bias_float", dtype="fp16"),
    Case(190, 190, dim=192, dim_v=192, keys="key_mask"),
)
SMALL = (Case(33, 70, mask="causal"), Case(20, 41, layout="varlen", sinks=True), Case(1, 1))
PROBABILITIES = (1 / 256, 0.17, 0.5, 0.51, 0.9, 0.999)  # thresholds 1, 44, 128, 131, 230 and 255


def with_dropout(args: AttentionArgs, p: float) -> AttentionArgs:
    return replace(args, dropout_p=p, dropout_seed=new_seed(args.q.device))


def new_seed(device: torch.device) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (2,), device=device)


def check(case: Case, device: torch.device, p: float) -> None:
    args = with_dropout(build(case, device), p)
    assert dispatch.select(args).kernel not in ("flash_decode", "flash_fwd_f32")
    truth, truth_lse = standard.attention(args)
    same_dtype = standard.same_dtype(args)
    for name, kernel in kernels_for(args).items():
        out, lse = run(args, kernel)
        again, _ = run(args, kernel)
        other, other_lse = run(replace(args, dropout_seed=new_seed(device)), kernel)
        try:
            assert_out_close(out, truth, same_dtype, rtol=3.0 if args.softcap else 2.0)
            assert_lse_close(lse, truth_lse)
            assert torch.equal(out, again), "the same seed gives other bits"
            assert torch.equal(lse, other_lse), "lse depends on the seed"
            assert out.numel() < 1000 or not torch.equal(out, other), "another seed gives the same bits"
        except AssertionError as error:
            error.add_note(f"kernel: {name}")
            raise


def check_mask(dim: int, device: torch.device, p: float, *, causal: bool) -> None:
    """Values are rows of the identity, so that the output is the dropped probabilities of `dim` keys."""
    batch, heads, rows, keys = 2, 4, 300, 700
    g = generator(("mask", dim, p), device)
    q, k = (randn((batch, n, h, dim), torch.bfloat16, g) for n, h in ((rows, heads), (keys, 2)))
    seed = new_seed(device)
    window_right = 0 if causal else -1
    visible = torch.ones(rows, keys, dtype=torch.bool, device=device)
    if causal:
        visible = visible.tril(keys - rows)
    for first in range(0, keys, dim):
        v = torch.zeros(batch, keys, 2, dim, dtype=torch.bfloat16, device=device)
        count = min(dim, keys - first)
        v[:, first : first + count] = torch.eye(count, dim, dtype=v.dtype, device=device)[:, None]
        args = AttentionArgs(q, k, v, 0.05 / dim**0.5, window_right=window_right, dropout_p=p, dropout_seed=seed)
        kept = keep_mask(seed, batch, heads, rows, keys, args.dropout_threshold, device) & visible
        for name, kernel in kernels_for(args).items():
            found = run(args, kernel)[0].transpose(1, 2)[..., :count] != 0  # [batch, heads, rows, count]
            wrong = (found != kept[..., first : first + count]).nonzero()
            assert wrong.numel() == 0, f"{name}: {len(wrong)} scores, first at {wrong[0].tolist()} + key {first}"


def check_gradients(device: torch.device) -> None:
    args = with_dropout(build(Case(130, 200, dim=64, mask="causal", batch=2), device), 0.2)
    grad_out = torch.randn_like(args.q)

    def gradients(attend: Callable[[AttentionArgs], Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x.to(dtype).requires_grad_() for x in (args.q, args.k, args.v)]
        out = attend(replace(args, q=leaves[0], k=leaves[1], v=leaves[2]))
        return torch.autograd.grad((out * grad_out.to(out.dtype)).sum(), leaves)

    ours = gradients(attention, args.dtype)
    truths = gradients(lambda a: standard.attention(a)[0], torch.float64)
    same_dtype = gradients(standard.same_dtype, args.dtype)
    for mine, truth, same in zip(ours, truths, same_dtype, strict=True):
        assert_out_close(mine, truth, same)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_drop_what_the_reference_drops(shape: Case, device: torch.device) -> None:
    check(shape, device, 0.17)


@pytest.mark.gpu
@pytest.mark.parametrize("p", PROBABILITIES)
def test_every_threshold(p: float, device: torch.device) -> None:
    check(Case(300, 300, dim=64), device, p)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_mask_is_the_references_score_by_score(dim: int, causal: bool, device: torch.device) -> None:
    check_mask(dim, device, 0.3, causal=causal)


@pytest.mark.gpu
def test_gradients_use_the_forwards_mask(device: torch.device) -> None:
    check_gradients(device)


@pytest.mark.gpu
def test_about_as_many_are_dropped_as_asked_for(device: torch.device) -> None:
    q = torch.zeros(1, 512, 8, 64, dtype=torch.bfloat16, device=device)
    k = torch.zeros(1, 64, 8, 64, dtype=torch.bfloat16, device=device)
    v = torch.eye(64, dtype=torch.bfloat16, device=device)[None, :, None].expand(1, 64, 8, 64).contiguous()
    dropped = flash_attn_func(q, k, v, 0.25) == 0
    assert abs(dropped.double().mean().item() - 0.25) < 6 * (0.25 * 0.75 / dropped.numel()) ** 0.5


@pytest.mark.gpu
def test_every_replay_of_a_graph_drops_others_and_torchs_seed_repeats_them(cuda: torch.device) -> None:
    g = generator("dropout graph", cuda)
    q, k, v = (randn((2, 300, 4, 128), torch.bfloat16, g) for _ in range(3))
    graph, out = captured(lambda: flash_attn_func(q, k, v, 0.3, causal=True))
    results = []
    for seed in (5, None, 5, None):
        if seed is not None:
            torch.cuda.manual_seed(seed)
        graph.replay()
        results.append(out.clone())
    first, second, first_again, second_again = results
    assert not torch.equal(first, second)
    assert torch.equal(first, first_again), _difference(first, first_again)
    assert torch.equal(second, second_again), _difference(second, second_again)


def _difference(a: Tensor, b: Tensor) -> str:
    """Whether rows were dropped otherwise, or whole tiles are missing."""
    rows = (a != b).any(-1)  # [batch, rows, heads]
    empty = [int((x == 0).all(-1)[rows].sum()) for x in (a, b)]
    heads = rows.any(1).sum()
    return f"{int(rows.sum())} rows of {rows.numel()} differ, in {int(heads)} heads; nothing but zeros: {empty}"


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_dropout_on_cpu(shape: Case) -> None:
    check(shape, torch.device("cpu"), 0.3)


def test_the_checks_of_mask_and_gradients_on_cpu() -> None:
    check_mask(256, torch.device("cpu"), 0.3, causal=True)
    check_gradients(torch.device("cpu"))
