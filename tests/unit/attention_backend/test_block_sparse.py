"""Block-sparse attention on the CPU: against dense masked softmax in float64, its gradients, its operator, its cost."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attention_backend import block_patterns
from attention_backend.block_sparse import BlockSparsity, block_sparse_attention, block_sparse_attention_op
from attention_backend.errors import UnsupportedError
from attention_backend.reference import block_sparse_attention as reference

TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
LENGTH = st.one_of(st.integers(1, 400), st.sampled_from([128, 256]))


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Masked softmax in float64. mask `[1 or batch, 1 or heads, seqlen_q, seqlen_k]`."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    empty = ~mask.any(-1, keepdim=True)
    s = (q @ k.mT * scale).masked_fill(~mask, -torch.inf).masked_fill(empty, 0.0)
    p = s.softmax(-1).masked_fill(empty, 0.0)
    return (p @ v).transpose(1, 2), s.logsumexp(-1).masked_fill(empty.squeeze(-1), -torch.inf)


def tensors(
    seqlen_q: int,
    seqlen_k: int,
    batch: int = 2,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 24),
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = ((seqlen_q, heads[0], dims[0]), (seqlen_k, heads[1], dims[0]), (seqlen_k, heads[1], dims[1]))
    q, k, v = (torch.randn(batch, *shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v


def mask_of(seed: int, batch: int, heads: int, rows: int, keys: int) -> Tensor:
    """Empty, partial and full blocks; some rows see nothing at all."""
    g = torch.Generator().manual_seed(seed)
    kinds = torch.randint(0, 3, (batch, heads, -(-rows // 128), -(-keys // 128)), generator=g)
    kinds = kinds.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :rows, :keys]
    mask = (kinds == 2) | ((kinds == 1) & (torch.rand(batch, heads, rows, keys, generator=g) < 0.3))
    return mask & (torch.rand(batch, heads, rows, 1, generator=g) < 0.9)


def check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> None:
    """Forward in q's dtype and backward against autograd through the dense formula."""
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = block_sparse_attention(q, k, v, BlockSparsity.from_mask(mask), softmax_scale=0.3, return_lse=True)
    truth, truth_lse = dense(q, k, v, mask, 0.3)
    tolerance = TOLERANCE[q.dtype]
    assert out.dtype == q.dtype
    torch.testing.assert_close(out.double(), truth, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), truth_lse, atol=1e-5, rtol=1e-5)
    grad_out, grad_lse = torch.randn_like(truth), torch.randn_like(truth_lse)
    seen = truth_lse != -torch.inf
    ours = torch.autograd.grad((out * grad_out).sum() + (lse[seen] * grad_lse[seen]).sum(), leaves)
    theirs = torch.autograd.grad((truth * grad_out).sum() + (truth_lse[seen] * grad_lse[seen]).sum(), leaves)
    for grad, true_grad in zip(ours, theirs, strict=True):
        torch.testing.assert_close(grad, true_grad, atol=50 * tolerance, rtol=50 * tolerance)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**31), LENGTH, LENGTH, st.sampled_from([(4, 4), (4, 2), (6, 1)]), st.booleans(), st.booleans())
def test_any_mask_is_attended_exactly_with_gradients(
    seed: int, rows: int, keys: int, heads: tuple[int, int], of_batch: bool, of_head: bool
) -> None:
    mask = mask_of(seed, 2 if of_batch else 1, heads[0] if of_head else 1, rows, keys)
    check(*tensors(rows, keys, heads=heads, seed=seed % 1000), mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_keeps_its_tolerance(dtype: torch.dtype) -> None:
    q, k, v = tensors(300, 333, dtype=dtype)
    mask = mask_of(3, 1, 4, 300, 333)
    out = block_sparse_attention(q, k, v, BlockSparsity.from_mask(mask), softmax_scale=0.3)
    torch.testing.assert_close(
        torch.as_tensor(out).double(), dense(q, k, v, mask, 0.3)[0], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


def test_small_tiles_add_up_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(300, 700)
    sparsity = BlockSparsity.from_mask(mask_of(5, 1, 1, 300, 700))
    out = torch.as_tensor(block_sparse_attention(q, k, v, sparsity))
    monkeypatch.setattr(reference, "_TILE_ELEMENTS", 1)  # one block at a time
    torch.testing.assert_close(torch.as_tensor(block_sparse_attention(q, k, v, sparsity)), out, atol=1e-13, rtol=1e-13)


def test_rows_that_see_nothing_are_zero_with_zero_gradients() -> None:
    q, k, v = (x.requires_grad_() for x in tensors(256, 256))
    mask = torch.zeros(1, 1, 256, 256, dtype=torch.bool)
    mask[:, :, :100, :50] = True  # rows 100 to 127 share a block with others, 128 to 255 have no block
    out, lse = block_sparse_attention(q, k, v, BlockSparsity.from_mask(mask), return_lse=True)
    assert not out[:, 100:].any()
    assert bool((lse[:, :, 100:] == -torch.inf).all())
    dq, dk, dv = torch.autograd.grad(out.square().sum(), [q, k, v])
    assert not dq[:, 100:].any()
    assert not dk[:, 50:].any()
    assert not dv[:, 50:].any()
    assert bool(dq[:, :100].any())


def test_nothing_of_an_unlisted_block_reaches_anything() -> None:
    q, k, v = tensors(512, 512)
    sparsity = block_patterns.sliding_window(512, window=(0, 0))
    k[:, 128:], v[:, 128:] = torch.nan, torch.nan
    out = torch.as_tensor(block_sparse_attention(q, k, v, sparsity))
    assert bool(out[:, :128].isfinite().all())
    assert bool(out[:, 128:].isnan().all())


def test_gradients_pass_gradcheck() -> None:
    q, k, v = (x.requires_grad_() for x in tensors(5, 131, batch=1, heads=(2, 1), dims=(3, 2)))
    sparsity = BlockSparsity.from_mask(torch.rand(1, 2, 5, 131) < 0.3)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return block_sparse_attention(q, k, v, sparsity, return_lse=True)

    assert torch.autograd.gradcheck(call, (q, k, v))


def test_the_operator_keeps_torch_librarys_contract() -> None:
    q, k, v = (x.requires_grad_() for x in tensors(130, 200))
    for mask in (mask_of(1, 1, 1, 130, 200), mask_of(2, 2, 4, 130, 200)):
        torch.library.opcheck(block_sparse_attention_op.overload, (q, k, v, 0.25, *BlockSparsity.from_mask(mask).lists))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_as_one_graph_with_gradients(backend: str) -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor, sparsity: BlockSparsity) -> Tensor:
        return torch.as_tensor(block_sparse_attention(q, k, v, sparsity)).square().sum()

    sparsity = block_patterns.sliding_window(300, window=(100, 0), global_tokens=3)
    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend=backend)):
        q, k, v = leaves = [x.requires_grad_() for x in tensors(300, 300)]
        results.append(torch.autograd.grad(function(q, k, v, sparsity), leaves))
    for ours, truth in zip(*results, strict=True):
        assert torch.equal(ours, truth)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_block_mask_gives_what_flex_attention_gives() -> None:
    documents = torch.arange(3).repeat_interleave(100)

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (documents[q] == documents[k]) & ((q - k).abs() <= 40 * (h + 1))

    block_mask = create_block_mask(mod, None, 4, 300, 300, device="cpu")
    q, k, v = tensors(300, 300, dims=(16, 16), dtype=torch.float32)
    ours = torch.as_tensor(block_sparse_attention(q, k, v, block_mask))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    theirs = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)
    torch.testing.assert_close(ours, theirs.transpose(1, 2), atol=5e-6, rtol=5e-6)


def multiplications(seqlen: int, sparsity: BlockSparsity) -> int:
    """Floating-point operations of the reference's matrix products."""
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = tensors(seqlen, seqlen, batch=1, heads=(1, 1), dims=(16, 16))
    with FlopCounterMode(display=False) as counter:
        reference.forward(q, k, v, 1.0, sparsity.lists)
    return counter.get_total_flops()


def test_cost_is_that_of_the_listed_blocks() -> None:
    blocks = 2048 // 128
    for sparsity in (
        block_patterns.causal(2048),
        block_patterns.sliding_window(2048, window=(200, 0)),
        block_patterns.butterfly(2048),
    ):
        listed = round(sparsity.density * blocks**2)
        assert multiplications(2048, sparsity) == listed * 128 * 128 * 16 * 2 * 2


def test_other_devices_and_wrong_problems_are_refused() -> None:
    q, k, v = tensors(300, 300)
    sparsity = block_patterns.causal(300)
    with pytest.raises(ValueError, match="300 x 300, q and k have 300 x 200"):
        block_sparse_attention(q, k[:, :200], v[:, :200], sparsity)
    with pytest.raises(ValueError, match=r"3 x 1 lists, wanted 1 or 2 \(batch\) by 1 or 4"):
        block_sparse_attention(q, k, v, block_patterns.prefix_lm([1, 2, 3], 300))
    with pytest.raises(ValueError, match="counts is on meta"):
        block_sparse_attention(q, k, v, sparsity.to("meta"))
    with pytest.raises(TypeError, match="one dtype"):
        block_sparse_attention(q, k.float(), v, sparsity)
    elsewhere = [x.to("meta") for x in (q, k, v)]
    with pytest.raises(UnsupportedError, match=r"flash_fwd_sm90 serves .* but it runs on cuda"):
        block_sparse_attention_op.run(*elsewhere, 0.25, *sparsity.lists)


def test_a_gradient_of_a_gradient_is_an_error() -> None:
    q = torch.randn(1, 128, 2, 16, requires_grad=True)
    out = block_sparse_attention(q, q, q, BlockSparsity.from_mask(torch.ones(1, 1, 128, 128, dtype=torch.bool)))
    (gradient,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="differentiable once"):
        gradient.square().sum().backward()
