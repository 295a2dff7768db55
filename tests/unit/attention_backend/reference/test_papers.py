"""The algorithms of the papers compute standard attention and its gradients, in float64."""

import pytest
import torch
from torch import Tensor

from attention_backend.reference import block_sparse, flash_attention_1, flash_attention_2, online_softmax, rabe_staats
from attention_backend.reference.block_dropout import keep_scale

SIZES = [(1, 1), (64, 64), (63, 65), (67, 131)]
SCALE = 0.3


def problem(rows: int, keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(rows * 1000 + keys)
    q, k, v = (torch.randn(2, 3, n, 16, dtype=torch.float64, requires_grad=True) for n in (rows, keys, keys))
    return q, k, v, torch.randn(2, 3, rows, 16, dtype=torch.float64)


def check(
    ours: tuple[Tensor, ...],
    leaves: tuple[Tensor, Tensor, Tensor],
    grad_out: Tensor,
    mask: Tensor | None,
    z: Tensor | float = 1.0,
) -> None:
    """ours is (out, dq, dk, dv); z multiplies the probabilities (dropout)."""
    q, k, v = leaves
    s = SCALE * q @ k.mT
    if mask is not None:
        empty = ~mask.any(-1, keepdim=True)
        s = s.masked_fill(~mask & ~empty, -torch.inf)
        z = z * (~empty).to(s.dtype)
    out = (s.softmax(-1) * z) @ v
    gradients = torch.autograd.grad(out, leaves, grad_out)
    for name, a, b in zip(("out", "dq", "dk", "dv"), ours, (out, *gradients), strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), atol=1e-11, rtol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


def bottom_right(rows: int, keys: int) -> Tensor:
    return torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)


@pytest.mark.parametrize("block", [1, 7, 64, 200])
def test_online_softmax(block: int) -> None:
    scores = (torch.randn(5, 130, dtype=torch.float64) * 50).requires_grad_()
    truth = scores.softmax(-1)
    p = online_softmax.online_softmax(scores.detach(), block)
    torch.testing.assert_close(p, truth.detach())
    grad = torch.randn_like(p)
    (wanted,) = torch.autograd.grad(truth, scores, grad)
    torch.testing.assert_close(online_softmax.online_softmax_backward(p, grad), wanted)


@pytest.mark.parametrize(("rows", "keys"), SIZES)
def test_rabe_and_staats(rows: int, keys: int) -> None:
    q, k, v, grad_out = problem(rows, keys)
    plain = [x.detach() for x in (q, k, v)]
    out = rabe_staats.forward(*plain, SCALE, chunk=32)
    check((out, *rabe_staats.backward(*plain, grad_out, SCALE, chunk=32)), (q, k, v), grad_out, None)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "keys"), [*SIZES, (65, 40)])
def test_standard_attention_of_the_paper(rows: int, keys: int, causal: bool) -> None:
    q, k, v, grad_out = problem(rows, keys)
    mask = bottom_right(rows, keys) if causal else None
    plain = [x.detach() for x in (q, k, v)]
    out, p = flash_attention_1.standard_forward(*plain, SCALE, mask)
    gradients = flash_attention_1.standard_backward(*plain, p, grad_out, SCALE)
    check((out, *gradients), (q, k, v), grad_out, mask)


@pytest.mark.parametrize("sram", [1024, 4096])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "keys"), [*SIZES, (65, 40)])
def test_flash_attention_1(rows: int, keys: int, causal: bool, sram: int) -> None:
    q, k, v, grad_out = problem(rows, keys)
    mask = bottom_right(rows, keys) if causal else None
    plain = [x.detach() for x in (q, k, v)]
    saved = flash_attention_1.forward(*plain, SCALE, mask, sram_elements=sram)
    gradients = flash_attention_1.backward(*plain, saved, grad_out, SCALE, mask, sram_elements=sram)
    check((saved.out, *gradients), (q, k, v), grad_out, mask)


def test_flash_attention_1_makes_the_same_dropout_again_in_backward() -> None:
    q, k, v, grad_out = problem(67, 131)
    plain, p = [x.detach() for x in (q, k, v)], 0.25
    saved = flash_attention_1.forward(*plain, SCALE, dropout_p=p, sram_elements=2048)
    torch.manual_seed(99)  # backward must not look at torch's generator
    gradients = flash_attention_1.backward(*plain, saved, grad_out, SCALE, dropout_p=p, sram_elements=2048)
    block_r, block_c = flash_attention_1.block_sizes(2048, 16)
    z = torch.zeros(2, 3, 67, 131, dtype=torch.float64)
    for i in range(0, 67, block_r):
        for j in range(0, 131, block_c):
            part = z[..., i : i + block_r, j : j + block_c]
            part.copy_(keep_scale(saved.state, i // block_r, j // block_c, part.shape, p, part))
    assert abs((z == 0).double().mean().item() - p) < 0.02
    check((saved.out, *gradients), (q, k, v), grad_out, None, z)
    assert flash_attention_1.forward(*plain, SCALE, dropout_p=p).state != saved.state


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "keys"), [*SIZES, (65, 40)])
def test_flash_attention_2(rows: int, keys: int, causal: bool) -> None:
    q, k, v, grad_out = problem(rows, keys)
    plain = [x.detach() for x in (q, k, v)]
    out, lse = flash_attention_2.forward(*plain, SCALE, causal)
    gradients = flash_attention_2.backward(*plain, out, lse, grad_out, SCALE, causal)
    mask = bottom_right(rows, keys) if causal else None
    check((out, *gradients), (q, k, v), grad_out, mask)
    s = SCALE * plain[0] @ plain[1].mT
    s = s if mask is None else s.masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(lse.squeeze(-1), s.logsumexp(-1))


def test_block_sparse_skips_what_is_not_listed() -> None:
    q, k, v, grad_out = problem(67, 131)
    blocks = torch.rand(5, 5) < 0.5
    blocks[2] = False  # rows that see nothing
    blocks[:, 1] = False
    mask = blocks.repeat_interleave(16, 0)[:67].repeat_interleave(32, 1)[:, :131]
    plain = [x.detach() for x in (q, k, v)]
    for x in plain[1:]:
        x[..., 32:64, :] = torch.nan  # never read
    out, lse = block_sparse.forward(*plain, blocks, SCALE, 16, 32)
    assert bool((lse[..., 32:48, :] == -torch.inf).all())
    gradients = block_sparse.backward(*plain, out, lse, grad_out, blocks, SCALE, 16, 32)
    clean = problem(67, 131)[:3]
    check((out, *gradients), clean, grad_out, mask)
