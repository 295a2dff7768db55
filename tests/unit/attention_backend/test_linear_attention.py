"""The public function: gradients, the compiler's view of the operator, and refusals in words."""

import pytest
import torch
from torch import Tensor

from attention_backend.errors import UnsupportedError
from attention_backend.linear import linear_attention
from attention_backend.reference import linear as reference


def inputs(seqlen_q: int, seqlen_k: int, *, heads: int = 4, kv_heads: int = 2, dim: int = 4) -> list[Tensor]:
    g = torch.Generator().manual_seed(seqlen_q)
    shapes = ((2, seqlen_q, heads, dim), (2, seqlen_k, kv_heads, dim), (2, seqlen_k, kv_heads, dim))
    return [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("length", [1, 63, 64, 65, 101])
@pytest.mark.parametrize("causal", [False, True])
def test_it_is_the_quadratic_form(length: int, causal: bool) -> None:
    q, k, v = inputs(length, length)
    torch.testing.assert_close(linear_attention(q, k, v, causal=causal), reference.quadratic(q, k, v, causal=causal))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("normalize", [True, False])
def test_its_gradient_is_right(causal: bool, normalize: bool) -> None:
    leaves = tuple(x.requires_grad_() for x in inputs(11, 11))

    def run(*x: Tensor) -> Tensor:
        return linear_attention(*x, causal=causal, normalize=normalize, chunk_size=4)

    assert torch.autograd.gradcheck(run, leaves)


def test_no_gradient_is_made_for_what_needs_none() -> None:
    q, k, v = inputs(8, 8)
    k.requires_grad_()
    linear_attention(q, k, v, causal=True).sum().backward()
    assert q.grad is None
    assert k.grad is not None


@pytest.mark.parametrize("causal", [False, True])
def test_the_operator_keeps_its_promises_to_torch(causal: bool) -> None:
    q, k, v = (x.float().requires_grad_() for x in inputs(10, 10))
    torch.library.opcheck(torch.ops.longwave.linear_attention.default, (q, k, v, causal, "elu", True, 4))


def test_a_strided_batch_is_read_as_it_lies() -> None:
    both = torch.randn(2, 30, 3 * 4 * 8)
    q, k, v = both.unflatten(2, (3, 4, 8)).unbind(2)
    want = linear_attention(q.contiguous(), k.contiguous(), v.contiguous(), causal=True)
    torch.testing.assert_close(linear_attention(q, k, v, causal=True), want)


def test_nothing_in_gives_nothing_out() -> None:
    q, k, v = inputs(0, 0)
    assert linear_attention(q, k, v).shape == q.shape
    assert linear_attention(q, k, v, causal=True).shape == q.shape


def test_no_keys_give_zeros() -> None:
    q, k, v = inputs(3, 0)
    assert torch.equal(linear_attention(q, k, v), torch.zeros_like(q))


def test_wrong_shapes_are_refused_in_words() -> None:
    q, k, v = inputs(8, 8)
    with pytest.raises(ValueError, match=r"q must be \[batch, seqlen, heads, head_dim\]"):
        linear_attention(q[0], k, v)
    with pytest.raises(ValueError, match="k and v must agree"):
        linear_attention(q, k, v[:, :4])
    with pytest.raises(ValueError, match="one batch and head_dim"):
        linear_attention(q[..., :2], k, v)
    with pytest.raises(ValueError, match="multiple of num_kv_heads"):
        linear_attention(q[:, :, :3], k, v)
    with pytest.raises(ValueError, match="of one length, got 8 rows and 7 keys"):
        linear_attention(q, k[:, :7], v[:, :7], causal=True)
    with pytest.raises(ValueError, match="must be contiguous"):
        linear_attention(q, k, v.transpose(2, 3).contiguous().transpose(2, 3))


def test_wrong_options_are_refused_in_words() -> None:
    q, k, v = inputs(8, 8)
    with pytest.raises(ValueError, match="one of elu, relu, none, got 'softmax'"):
        linear_attention(q, k, v, feature_map="softmax")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chunk_size must be at least 1"):
        linear_attention(q, k, v, chunk_size=0)
    with pytest.raises(TypeError, match="one floating point dtype"):
        linear_attention(q, k.float(), v)
    with pytest.raises(TypeError, match="of 16 bits or more, got q torch"):
        linear_attention(*(x.to(torch.float8_e4m3fn) for x in (q, k, v)))


def test_a_gradient_of_a_gradient_is_an_error() -> None:
    q = torch.randn(1, 3, 2, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(linear_attention(q, q, q).sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="differentiable once"):
        gradient.square().sum().backward()
