"""Gradients of attention as plain as possible, one sequence at a time, in any dtype: the truth of the backward.

Written out rather than by autograd, which makes NaN of rows that see nothing. `error_rule` holds kernels to it.
"""

from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from attention_backend import backward
from attention_backend.heuristics.sm90_backward import BackwardTile
from attention_backend.problem import AttentionArgs
from attention_backend.reference import dropout

from . import oracle
from .error_rule import assert_out_close, assert_sums_close, poisoned_memory

NAMES = ("dq", "dk", "dv", "dsinks")  # what kernels give; autograd gives dbias besides
NOISE = 1e-5  # a row that sees one key has score gradient dP - D = 0, of which float32 keeps its rounding


@dataclass(frozen=True)
class Gradients:
    """In the compute dtype, shaped like the tensors they belong to."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks_terms: Tensor | None  # float64 [num_heads, rows of all sequences]; their sum is dsinks
    of_rounding: dict[
        str, float
    ]  # the largest change of dq, dk, dsinks and dbias if D is taken from the output that was given
    dbias: Tensor | None = None


def gradients(
    args: AttentionArgs,
    grad_out: Tensor,
    grad_lse: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    *,
    reorder: bool = False,
    out: Tensor | None = None,
) -> Gradients:
    """Every product, probability and score gradient is rounded to `dtype`. `reorder` scales k instead of q. `out`: as a
    backward is given it."""
    device, group = args.q.device, args.num_heads // args.num_kv_heads
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=device) for x in (args.q, args.k, args.v))
    dsinks_terms = [torch.zeros((args.num_heads, 0), dtype=torch.float64, device=device)]
    of_rounding = {"dq": 0.0, "dk": 0.0, "dsinks": 0.0, "dbias": 0.0}
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    of_scores, changes = list[Tensor](), list[Tensor]()
    for seq in oracle.sequences(args):
        if seq.q.shape[0] == 0:
            continue
        dense = args.cu_seqlens_q is None
        empty = ~seq.visible.any(1)
        rows = (grad_out[seq.index] if dense else grad_out[seq.rows]).masked_fill(empty[:, None, None], 0.0)
        q, do = (x.to(dtype).transpose(0, 1) for x in (seq.q.masked_fill(empty[:, None, None], 0.0), rows))
        k, v = (x.to(dtype).repeat_interleave(group, dim=1).transpose(0, 1) for x in (seq.k, seq.v))
        scale = args.softmax_scale
        products = q @ (k * scale).mT if reorder else (q * scale) @ k.mT  # [heads, n_q, n_k]
        capped = torch.tanh(products / args.softcap) * args.softcap if args.softcap else products
        logits = _with_additions(args, seq, capped).to(exact).masked_fill(~seq.visible, -torch.inf)
        if args.sinks is not None:
            sinks = args.sinks.to(exact).view(-1, 1, 1).expand(-1, logits.shape[1], 1)
            logits = torch.cat([logits, sinks], dim=2)
        p = logits.softmax(2).masked_fill(empty[:, None], 0.0)
        p, p_sink = p[:, :, : seq.k.shape[0]].to(dtype), p[:, :, seq.k.shape[0] :]
        kept = _kept(args, seq.index, p)
        dp = (do @ v.mT) * kept
        delta = (p.to(exact) * dp.to(exact)).sum(2, keepdim=True)
        if grad_lse is not None:
            row_grads = grad_lse[seq.index] if dense else grad_lse[:, seq.rows]
            delta = delta - row_grads.to(exact).masked_fill(empty, 0.0).unsqueeze(2)
        dsinks_terms.append(-(p_sink * delta).double().sum(2))
        ds = (p.to(exact) * (dp.to(exact) - delta)).to(dtype)
        of_scores.append(ds)
        slope = 1 - (capped / args.softcap) ** 2 if args.softcap else 1.0
        ds = ds * slope
        if out is not None:
            given = (out[seq.index] if dense else out[seq.rows]).to(dtype).transpose(0, 1)
            of_d = (do * (given - (p * kept) @ v)).sum(2, keepdim=True)
            changes.append(p * of_d)
            _keep_largest(of_rounding, changes[-1] * slope * scale, p_sink * of_d, q, k, group)
        slots = oracle.key_slots(args, seq.index)
        seq_dq = ((ds @ k) * scale).transpose(0, 1)
        if dense:
            dq[seq.index] = seq_dq
        else:
            dq[seq.rows] = seq_dq
        dk[slots] = _of_key_heads(ds.mT @ q, group).to(dtype) * scale
        dv[slots] = _of_key_heads((p * kept).mT @ do, group).to(dtype)
    dbias = None if args.bias is None else _of_bias(args.bias, of_scores, exact).to(dtype)
    of_rounding["dbias"] = 0.0 if args.bias is None else _largest(_of_bias(args.bias, changes, exact))
    dsinks = torch.cat(dsinks_terms, dim=1) if args.sinks is not None else None
    return Gradients(dq, dk, dv, dsinks, of_rounding, dbias)


def check(
    args: AttentionArgs,
    kernel: str,
    *,
    with_lse: bool = False,
    tile: BackwardTile | None = None,
) -> None:
    """The gradients of `args` by a kernel of `backward.TABLE`, held to FlashAttention's rule. Plain torch, which does
    without the output, counts as erring at least as much as an exact backward would to which it is given rounded: where
    few rows see anything, by luck it errs less.

    `tile` is what flash_bwd_sm90 does not choose by itself.
    What the kernel does not write comes back as NaN; so do rows of q and dO that see nothing.
    """
    from attention_backend import dispatch

    g = torch.Generator(args.q.device).manual_seed(17)
    out, lse = dispatch.run(args)
    grad_out = torch.randn(args.out_shape, device=out.device, generator=g).to(out.dtype)
    grad_lse = torch.randn(args.lse_shape, device=out.device, generator=g) if with_lse else None
    dead = lse == -torch.inf
    grad_out[dead.transpose(-1, -2)] = torch.nan
    truth = gradients(args, grad_out, grad_lse, out=out)
    same_dtype = gradients(args, grad_out, grad_lse, args.dtype, reorder=True)
    implementation = backward.implementation(kernel)
    if tile is None:
        results = {"as called": backward.run(args, out, lse, grad_out, grad_lse, kernel=kernel)}
    else:
        from attention_backend.kernels import flash_bwd_sm90

        implementation = partial(flash_bwd_sm90.backward, tile=tile)
        results = {f"as called, {tile}": implementation(args, out, lse, grad_out, grad_lse)}
    with poisoned_memory():  # not by backward.run, to which it would be a wish for deterministic sums
        results["into NaN"] = implementation(args, out, lse, grad_out, grad_lse)
    for (how, result), name in product(results.items(), NAMES):
        try:
            assert_close(args, name, getattr(result, name), truth, same_dtype)
        except AssertionError as error:
            error.add_note(f"{name} by {kernel}, {how}")
            raise


def assert_close(
    args: AttentionArgs,
    name: str,
    got: Tensor | None,
    truth: Gradients,
    same_dtype: Gradients,
    noise: float = NOISE,
) -> None:
    """One of NAMES, or dbias, under the rule. `noise`: of numbers of size 1."""
    rtol = 3.0 if args.softcap else 2.0
    if name != "dsinks":
        exact, plain = getattr(truth, name), getattr(same_dtype, name)
        assert (got is None) == (exact is None)
        if got is None:
            return
        assert got.shape == exact.shape
        luck = max(0.0, truth.of_rounding.get(name, 0.0) - _largest(plain - exact))
        assert_out_close(got, exact, plain, rtol, noise + rtol * luck)
    elif truth.dsinks_terms is None or same_dtype.dsinks_terms is None:
        assert got is None
    else:
        assert got is not None
        assert got.shape == (args.num_heads,)
        assert_sums_close(got, truth.dsinks_terms, same_dtype.dsinks_terms, rtol, noise)


def kernels_for(args: AttentionArgs) -> list[str]:
    """The kernels of the table that serve the problem, plain torch only where there is no other."""
    serving = [line.kernel for line in backward.TABLE if line.refuses(args) is None]
    return [name for name in serving if name != "tiled_torch"] or serving


def _kept(args: AttentionArgs, sequence: int, p: Tensor) -> Tensor:
    """0 where dropout drops, dropout_scale elsewhere; `[heads, n_q, n_k]` in p's dtype."""
    if not args.dropout_threshold or args.dropout_seed is None:
        return torch.ones_like(p)
    which = torch.tensor([sequence], device=p.device)
    rows, keys = slice(0, p.shape[1]), slice(0, p.shape[2])
    kept = dropout.kept(args.dropout_seed, which, args.num_heads, rows, keys, args.dropout_threshold)[0]
    return kept.to(p.dtype) * args.dropout_scale


def _keep_largest(
    of_rounding: dict[str, float], change: Tensor, of_sinks: Tensor, q: Tensor, k: Tensor, group: int
) -> None:
    """`change`: of products of queries and keys; `of_sinks`: of sinks' gradients, each row's."""
    for name, x in (("dq", change @ k), ("dk", _of_key_heads(change.mT @ q, group))):
        of_rounding[name] = max(of_rounding[name], _largest(x))
    of_rounding["dsinks"] += _largest(of_sinks.abs().sum(1))


def _with_additions(args: AttentionArgs, seq: oracle.Sequence, scores: Tensor) -> Tensor:
    if args.alibi_slopes is not None:
        slopes = args.alibi_slopes if args.alibi_slopes.ndim == 1 else args.alibi_slopes[seq.index]
        scores = scores - (slopes.to(scores.dtype)[:, None, None] * seq.distance).to(scores.dtype)
    if args.bias is not None:
        scores = scores + args.bias[seq.index if args.bias.shape[0] > 1 else 0].to(scores.dtype)
    return scores


def _of_bias(bias: Tensor, of_scores: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The sum of all sequences' gradients of scores, in the bias's shape."""
    if not of_scores:
        return torch.zeros(bias.shape, dtype=dtype, device=bias.device)
    return torch.stack(of_scores).to(dtype).sum_to_size(bias.shape)


def _largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def _of_key_heads(x: Tensor, group: int) -> Tensor:
    """`[heads, n_k, d]` -> `[n_k, kv_heads, d]`, the sum over every group of query heads."""
    return x.unflatten(0, (-1, group)).sum(1).transpose(0, 1)
