"""The Hopper kernel over lists of blocks, against dense masked attention: patterns, head dims, lengths, lists.

Runs on the CPU's reference with LONGWAVE_KERNEL_TESTS_ON_CPU=1, like every test here.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attention_backend import block_patterns, dispatch
from attention_backend.block_sparse import BlockSparsity, block_sparse_attention
from attention_backend.problem import AttentionArgs

from .error_rule import assert_lse_close, assert_out_close, poisoned_memory
from .problems import DTYPES, generator, randn

BATCH, HEADS = 2, 4
Pattern = Callable[[int, int, torch.device], BlockSparsity]


@pytest.fixture(autouse=True)
def _hopper(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("block-sparse attention is served on Hopper only")


def blocky(name: object, batch: int, heads: int, rows: int, keys: int, device: torch.device) -> BlockSparsity:
    """Empty, partial and full blocks at random; whole rows of blocks empty, single rows empty."""
    g = generator(name, torch.device("cpu"))
    shape = (batch, heads, -(-rows // 128), -(-keys // 128))
    kinds = torch.randint(0, 3, shape, generator=g) * (torch.rand((*shape[:3], 1), generator=g) < 0.8)
    kinds = kinds.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :rows, :keys]
    mask = (kinds == 2) | ((kinds == 1) & (torch.rand(kinds.shape, generator=g) < 0.3))
    return BlockSparsity.from_mask((mask & (torch.rand((batch, heads, rows, 1), generator=g) < 0.95)).to(device))


def documents(rows: int, keys: int, device: torch.device) -> BlockSparsity:
    """Of the keys' length; the rows are its last, so lists are cut from those of the square."""
    ids = torch.randint(-1, 4, (BATCH, max(rows, keys)), device=device).sort(1).values
    mask = block_patterns.documents(ids).to_mask()
    return BlockSparsity.from_mask(mask[:, :, -rows:, :keys].contiguous())


PATTERNS: dict[str, Pattern] = {
    "causal": lambda n, m, device: block_patterns.causal(n, m, device=device),
    "window": lambda n, m, device: block_patterns.sliding_window(n, m, window=(150, 70), device=device),
    "longformer": lambda n, m, device: block_patterns.sliding_window(
        n, m, window=(100, 0), causal=True, global_tokens=torch.tensor([0, 1, m // 2], device=device)
    ),
    "dilated": lambda n, m, device: block_patterns.dilated_window(
        n, m, window=(20, 2), dilation=[1, 2, 7, 130], device=device
    ),
    "prefix": lambda n, m, device: block_patterns.prefix_lm([m // 3, 1], n, m, device=device),
    "documents": documents,
    "butterfly": lambda n, m, device: block_patterns.butterfly(n, m, device=device),
    "random": lambda n, m, device: blocky((n, m, 1, 1), 1, 1, n, m, device),
    "random of each sequence": lambda n, m, device: blocky((n, m, 2, 1), BATCH, 1, n, m, device),
    "random of each head": lambda n, m, device: blocky((n, m, 1, 4), 1, HEADS, n, m, device),
    "random of each": lambda n, m, device: blocky((n, m, 2, 4), BATCH, HEADS, n, m, device),
}
LENGTHS = [(512, 512), (384, 1024), (1024, 256), (500, 500), (129, 1000), (1000, 127), (1, 300), (640, 1153)]


def tensors(
    name: object, lengths: tuple[int, int], kv_heads: int, dim: int, device: torch.device, dtype: str = "bf16"
) -> tuple[Tensor, Tensor, Tensor]:
    g = generator((name, lengths, kv_heads, dim), device)
    shapes = ((lengths[0], HEADS), (lengths[1], kv_heads), (lengths[1], kv_heads))
    q, k, v = (randn((BATCH, n, heads, dim), DTYPES[dtype], g) for n, heads in shapes)
    return q, k, v


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dtype: torch.dtype, *, scale_keys: bool) -> list[Tensor]:
    """[out in `dtype`, lse], scores and products in `dtype`, softmax in at least float32."""
    scale, group = q.shape[-1] ** -0.5, q.shape[2] // k.shape[2]
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    q, k = (q, k * scale) if scale_keys else (q * scale, k)
    empty = ~mask.any(-1, keepdim=True)
    s = (q @ k.mT).to(torch.promote_types(dtype, torch.float32)).masked_fill(~mask, -torch.inf)
    s = s.masked_fill(empty, 0.0)
    p = s.softmax(-1).masked_fill(empty, 0.0).to(dtype)
    return [(p @ v).transpose(1, 2), s.logsumexp(-1).masked_fill(empty.squeeze(-1), -torch.inf)]


def run(q: Tensor, k: Tensor, v: Tensor, sparsity: BlockSparsity) -> tuple[Tensor, Tensor]:
    """(out, lse); what is not written comes back as NaN."""
    with poisoned_memory():
        result = block_sparse_attention(q, k, v, sparsity, return_lse=True)
    assert isinstance(result, tuple)
    return result


def check(q: Tensor, k: Tensor, v: Tensor, sparsity: BlockSparsity) -> None:
    out, lse = run(q, k, v, sparsity)
    mask = sparsity.to_mask()
    truth, truth_lse = dense(q, k, v, mask, torch.float64, scale_keys=False)
    same_dtype, _ = dense(q, k, v, mask, q.dtype, scale_keys=True)
    assert out.dtype == q.dtype
    assert lse.dtype == torch.float32
    assert_lse_close(lse, truth_lse)
    assert_out_close(out, truth, same_dtype)
    nothing = ~mask.any(-1).expand(q.shape[0], q.shape[2], -1).transpose(1, 2)
    assert not out[nothing].any(), "a row that sees nothing is not zero"


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern_meets_the_error_rule(
    name: str, dim: int, lengths: tuple[int, int], device: torch.device
) -> None:
    check(*tensors(name, lengths, 2, dim, device), PATTERNS[name](*lengths, device))


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["longformer", "dilated", "random", "random of each"])
def test_every_group_size_and_dtype_meets_the_error_rule(
    name: str, dtype: str, kv_heads: int, device: torch.device
) -> None:
    check(*tensors(name, (700, 900), kv_heads, 128, device, dtype), PATTERNS[name](700, 900, device))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_strides_of_packed_and_transposed_tensors_change_nothing(dim: int, device: torch.device) -> None:
    sparsity = PATTERNS["random of each"](600, 600, device)
    q, k, v = tensors("strides", (600, 600), HEADS, dim, device)
    truth, truth_lse = run(q, k, v, sparsity)
    packed = torch.stack([q, k, v], 2)
    by_head = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    for views in (packed.unbind(2), by_head):
        out, lse = run(views[0], views[1], views[2], sparsity)
        assert torch.equal(out, truth)
        assert torch.equal(lse, truth_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_lists_of_nothing_give_zero_and_minus_infinity_whatever_the_keys_hold(dim: int, device: torch.device) -> None:
    q, k, v = tensors("nothing", (300, 400), 2, dim, device)
    k.fill_(torch.nan)
    v.fill_(torch.nan)
    out, lse = run(q, k, v, BlockSparsity.from_mask(torch.zeros(1, 1, 300, 400, dtype=torch.bool, device=device)))
    assert not out.any()
    assert bool((lse == -torch.inf).all())


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_nan_in_an_unlisted_block_reaches_no_row(dim: int, device: torch.device) -> None:
    q, k, v = tensors("unlisted", (768, 1000), 2, dim, device)
    mask = blocky("unlisted", 1, 1, 768, 1000, device).to_mask()
    mask[:, :, 128:256] = False  # a row of blocks with an empty list
    unlisted = [0, 3, 6]  # of the key blocks 0 to 7, the last of 104 keys
    for block in unlisted:
        mask[..., block * 128 : (block + 1) * 128] = False
    mask[:, :, 384:, 896:] = True
    sparsity = BlockSparsity.from_mask(mask)
    truth, truth_lse = run(q, k, v, sparsity)
    for block in unlisted:
        for x in (k, v):
            x[:, block * 128 : (block + 1) * 128] = torch.nan
    out, lse = run(q, k, v, sparsity)
    assert torch.equal(out, truth)
    assert torch.equal(lse, truth_lse)


@pytest.mark.gpu
def test_what_lies_past_the_last_key_reaches_no_row(device: torch.device) -> None:
    sparsity = PATTERNS["random of each"](300, 333, device)
    q, k, v = tensors("past", (300, 333), 2, 128, device)
    room = [torch.full((BATCH, 512, *x.shape[2:]), torch.nan, dtype=x.dtype, device=device) for x in (k, v)]
    for memory, x in zip(room, (k, v), strict=True):
        memory[:, :333] = x
    out, lse = run(q, room[0][:, :333], room[1][:, :333], sparsity)
    truth, truth_lse = run(q, k, v, sparsity)
    assert torch.equal(out, truth)
    assert torch.equal(lse, truth_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["longformer", "random of each"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_thousand_repeats_are_bitwise_equal(dim: int, name: str, device: torch.device) -> None:
    sparsity = PATTERNS[name](1000, 1153, device)
    q, k, v = tensors("repeats", (1000, 1153), 2, dim, device)
    want, want_lse = run(q, k, v, sparsity)
    differing = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(1000 if device.type == "cuda" else 2):
        out, lse = block_sparse_attention(q, k, v, sparsity, return_lse=True)
        differing += (out != want).any() | (lse != want_lse).any()
    assert int(differing) == 0


def same_as_dispatch(q: Tensor, k: Tensor, v: Tensor, sparsity: BlockSparsity, left: int, right: int) -> None:
    """Both round the same exact sums, in another order: a few units in the last place of numbers of size 1."""
    args = AttentionArgs(q, k, v, q.shape[-1] ** -0.5, window_left=left, window_right=right)
    truth, truth_lse = dispatch.run(args)
    out, lse = run(q, k, v, sparsity)
    torch.testing.assert_close(lse, truth_lse, atol=2e-4, rtol=2e-5)
    torch.testing.assert_close(out, truth, atol=1e-2, rtol=1.6e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(512, 512), (500, 900), (2000, 2000)], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_causal_pattern_is_the_causal_kernel(dim: int, lengths: tuple[int, int], device: torch.device) -> None:
    q, k, v = tensors("causal", lengths, 2, dim, device)
    same_as_dispatch(q, k, v, block_patterns.causal(*lengths, device=device), -1, 0)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("left", [0, 1000, -1], ids=["diagonal", "window", "causal"])
@pytest.mark.parametrize("length", [16_384, 40_001])
def test_long_lists_and_many_tiles_are_the_window_kernel(length: int, left: int, cuda: torch.device) -> None:
    q, k, v = tensors("long", (length, length), 2, 128, cuda)
    sparsity = block_patterns.sliding_window(length, window=(left, 0), device=cuda)
    same_as_dispatch(q, k, v, sparsity, left, 0)


@pytest.mark.gpu
def test_patterns_built_on_the_device_are_those_of_the_cpu(device: torch.device) -> None:
    for name in ("causal", "window", "longformer", "dilated", "prefix", "butterfly"):
        here, there = (PATTERNS[name](640, 1153, d) for d in (device, torch.device("cpu")))
        for x, y in zip(here.lists, there.lists, strict=True):
            assert x.device.type == device.type
            assert torch.equal(x.cpu(), y)


@pytest.mark.gpu
def test_a_block_mask_of_captured_documents_is_served(device: torch.device) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    ids = torch.arange(5, device=device).repeat_interleave(200)

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (ids[q] == ids[k]) & (q >= k)

    block_mask = create_block_mask(mod, None, None, 1000, 1000, device=device)
    sparsity = BlockSparsity.from_block_mask(block_mask)
    assert torch.equal(sparsity.to_mask(), block_patterns.documents(ids).to_mask())
    check(*tensors("flex", (1000, 1000), 2, 128, device), sparsity)


@pytest.mark.gpu
def test_gradients_on_the_device_are_those_of_dense_attention(device: torch.device) -> None:
    sparsity = PATTERNS["random of each"](400, 500, device)
    q, k, v = leaves = [x.requires_grad_() for x in tensors("gradients", (400, 500), 2, 64, device)]
    weight = torch.randn(BATCH, 400, HEADS, 64, device=device, dtype=torch.float64)
    out = block_sparse_attention(q, k, v, sparsity)
    assert isinstance(out, Tensor)
    ours = torch.autograd.grad((out * weight).sum(), leaves)
    q, k, v = exact = [x.detach().double().requires_grad_() for x in leaves]
    truth = dense(q, k, v, sparsity.to_mask(), torch.float64, scale_keys=False)[0]
    for grad, true_grad in zip(ours, torch.autograd.grad((truth * weight).sum(), exact), strict=True):
        assert float((grad.double() - true_grad).norm() / true_grad.norm()) < 1e-2
