"""FlashAttention's own definition of correct, and running a problem with every allocation poisoned first.

With `ref` the attention in float64 and `pt` plain torch in the input dtype: max|out - ref| <= 2 max|pt - ref| + atol,
3 with softcap, where atol is twice the rounding of adding and removing 0.3 in the input dtype.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from attention_backend import dispatch
from attention_backend.problem import AttentionArgs

from . import oracle

Implementation = Callable[[AttentionArgs], tuple[Tensor, Tensor]]
_MEAN_FROM = 4096  # elements from which a mean says something


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, torch fills whatever it allocates uninitialised with NaN (the largest value for integers).

    Deterministic mode does that while `torch.utils.deterministic.fill_uninitialized_memory` is True, its default.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def filled_memory() -> Iterator[None]:
    """Inside, what torch leaves uninitialised is NaN (of integers, their largest value).

    For compute-sanitizer: initcheck does not see what the TMA stores. It has nothing to say then, and what was never
    written makes results NaN. `poisoned_memory` does that by torch's deterministic mode, in which the backward has only
    its deterministic one.
    """

    def filling(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            x = make(*args, **kwargs)
            if x.is_floating_point():
                return x.fill_(torch.nan)
            return x.fill_(True if x.dtype == torch.bool else torch.iinfo(x.dtype).max)

        return made

    with ExitStack() as stack:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
            stack.enter_context(mock.patch.object(owner, name, filling(getattr(owner, name))))
        yield


def kernels_for(args: AttentionArgs) -> dict[str, Implementation]:
    """Dispatch's choice, and the generic forward where dispatch prefers a kernel for fewer problems."""
    chosen = dispatch.select(args).kernel
    kernels: dict[str, Implementation] = {chosen: dispatch.run}
    if args.q.is_cuda and args.dtype != torch.float32 and chosen != "flash_fwd_sm80":
        from attention_backend.kernels import flash_fwd

        kernels["flash_fwd_sm80"] = flash_fwd.forward
    return kernels


def run(args: AttentionArgs, kernel: Implementation = dispatch.run) -> tuple[Tensor, Tensor]:
    """The problem by a kernel, dispatch's choice by default. Elements that are not written come back as NaN."""
    with poisoned_memory():
        out, lse = kernel(args)
    assert out.shape == args.out_shape
    assert out.dtype == args.dtype
    assert lse.shape == args.lse_shape
    assert lse.dtype == torch.float32
    return out, lse


def bound(truth: Tensor, same_dtype: Tensor, rtol: float) -> float:
    """The largest error allowed. `truth` in float64 or float32, `same_dtype` in the kernel's dtype."""
    if truth.numel() == 0:
        return 0.0
    rounded = truth.to(same_dtype.dtype)
    atol = 2 * ((rounded + 0.3 - 0.3) - rounded).abs().max().item()
    return rtol * (same_dtype - truth).abs().max().item() + atol


def assert_out_close(out: Tensor, truth: Tensor, same_dtype: Tensor, rtol: float = 2.0, noise: float = 0.0) -> None:
    """`noise` is allowed besides: where numbers of size 1 cancel, plain torch may have no error at all. So is one unit
    in the last place of the largest, of so few numbers that plain torch may be lucky with all of them, and of float32,
    where both errors are some of those units, of sums in another order: one seed in 3,800 had refused a right one."""
    if out.numel() == 0:
        return
    allowed = bound(truth, same_dtype, rtol) + noise
    if out.numel() < _MEAN_FROM or out.dtype == torch.float32:
        allowed += torch.finfo(out.dtype).eps * truth.abs().max().item()
    difference = (out - truth).abs()
    error = difference.max().item()
    assert error <= allowed, f"max error {error:.3e}, allowed {allowed:.3e} at {_worst(difference)}"  # NaN fails too
    if out.numel() >= _MEAN_FROM:
        mean, mean_pt = difference.mean().item(), (same_dtype - truth).abs().mean().item()
        slack = torch.finfo(out.dtype).eps * truth.abs().mean().item()
        assert mean <= rtol * mean_pt + slack + noise, f"mean error {mean:.3e}, plain torch {mean_pt:.3e}"


def assert_sums_close(sums: Tensor, terms: Tensor, same_dtype: Tensor, rtol: float = 2.0, noise: float = 0.0) -> None:
    """`[n]` sums over the rows of `terms` (float64) and `same_dtype` (plain torch's), both `[n, rows]`.

    The rule, for so few numbers that the errors of plain torch's rows may cancel by luck: its error is taken as three
    standard deviations of what they add up to. Besides, a sum may be one rounding of its own dtype off.
    """
    truth = terms.sum(1)
    allowed = rtol * 3 * (same_dtype - terms).norm(dim=1).max() + torch.finfo(sums.dtype).eps * truth.abs() + noise
    difference = (sums - truth).abs()
    assert bool((difference <= allowed).all()), (
        f"errors of sums {difference.tolist()}, allowed {allowed.tolist()}, sums {truth.tolist()}"
    )


def assert_lse_close(lse: Tensor, truth: Tensor) -> None:
    """Absolute 2e-4 plus 2e-5 of the size: float32 sums of exact products. -inf exactly where a row sees nothing."""
    empty = truth == -torch.inf
    assert torch.equal(lse == -torch.inf, empty), "lse is -inf in the wrong rows"
    difference = (lse - truth).abs().masked_fill(empty, 0.0)
    allowed = 2e-4 + 2e-5 * truth.abs().masked_fill(empty, 0.0)
    assert bool((difference <= allowed).all()), f"lse error {difference.max().item():.3e} at {_worst(difference)}"


def check(args: AttentionArgs, result: tuple[Tensor, Tensor] | None = None) -> None:
    """Runs `args` by every kernel of `kernels_for` (unless a result is given) and holds out and lse to the rule."""
    truth, truth_lse = oracle.attention(args)
    same_dtype, _ = oracle.attention(args, args.dtype, reorder=True)
    results = {"given": result} if result else {name: run(args, kernel) for name, kernel in kernels_for(args).items()}
    for name, (out, lse) in results.items():
        try:
            assert_out_close(out, truth, same_dtype, rtol=3.0 if args.softcap else 2.0)
            assert_lse_close(lse, truth_lse)
        except AssertionError as error:
            error.add_note(f"kernel: {name}")
            raise


def _worst(difference: Tensor) -> tuple[int, ...]:
    flat = int(difference.nan_to_num(nan=torch.inf).argmax())
    return tuple(int(i) for i in np.unravel_index(flat, difference.shape))
