"""Linear attention in chunks is the definition by the whole matrix of weights, and so are its gradients."""

import pytest
import torch
from torch import Tensor

from attention_backend.reference import linear
from attention_backend.reference.linear import FEATURE_MAPS, FeatureMap

LENGTHS = (1, 2, 63, 64, 65, 127, 131)


def inputs(
    seqlen_q: int, seqlen_k: int, *, heads: int = 4, kv_heads: int = 2, dim: int = 6, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seqlen_q * 1000 + seqlen_k)
    shapes = ((2, seqlen_q, heads, dim), (2, seqlen_k, kv_heads, dim), (2, seqlen_k, kv_heads, dim + 1))
    q, k, v = (torch.randn(shape, generator=g, dtype=dtype) for shape in shapes)
    return q, k, v


def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """One head pair at a time, from the definition, phi = elu + 1."""
    group = q.shape[2] // k.shape[2]
    out = q.new_zeros((*q.shape[:3], v.shape[3]))
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            for i in range(q.shape[1]):
                keys = range(i + 1 if causal else k.shape[1])
                phi_q = torch.where(q[b, i, h] > 0, q[b, i, h] + 1, q[b, i, h].exp())
                phi_k = [torch.where(x > 0, x + 1, x.exp()) for x in k[b, :, h // group]]
                weights = [torch.dot(phi_q, phi_k[j]) for j in keys]
                weighted = sum((w * v[b, j, h // group] for w, j in zip(weights, keys, strict=True)), torch.zeros(()))
                out[b, i, h] = weighted / sum(weights)
    return out


@pytest.mark.parametrize("causal", [False, True])
def test_it_is_the_definition_row_by_row(causal: bool) -> None:
    q, k, v = inputs(7, 7)
    torch.testing.assert_close(linear.quadratic(q, k, v, causal=causal), plain(q, k, v, causal))
    torch.testing.assert_close(linear.forward(q, k, v, causal=causal, chunk_size=3), plain(q, k, v, causal))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_chunks_are_the_whole_matrix(length: int, normalize: bool, feature_map: FeatureMap) -> None:
    q, k, v = inputs(length, length)
    if feature_map == "none":  # features already: positive, so that no denominator vanishes
        q, k = q.abs(), k.abs()
    for causal in (False, True):
        want = linear.quadratic(q, k, v, causal=causal, feature_map=feature_map, normalize=normalize)
        got = linear.forward(q, k, v, causal=causal, feature_map=feature_map, normalize=normalize)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 1000])
def test_the_chunk_size_changes_nothing(chunk_size: int) -> None:
    q, k, v = inputs(131, 131)
    got = linear.forward(q, k, v, causal=True, chunk_size=chunk_size)
    torch.testing.assert_close(got, linear.quadratic(q, k, v, causal=True))


def test_rows_and_keys_may_differ_in_number_without_a_mask() -> None:
    q, k, v = inputs(5, 67)
    torch.testing.assert_close(linear.forward(q, k, v), linear.quadratic(q, k, v))


@pytest.mark.parametrize("causal", [False, True])
def test_a_group_of_heads_shares_a_key_head(causal: bool) -> None:
    q, k, v = inputs(33, 33, heads=6, kv_heads=2)
    wide = linear.forward(q, k.repeat_interleave(3, 2), v.repeat_interleave(3, 2), causal=causal)
    torch.testing.assert_close(linear.forward(q, k, v, causal=causal), wide)


def test_a_row_of_zero_weights_gives_zero() -> None:
    q, k, v = inputs(4, 4)
    q[:, 2] = -1.0
    out = linear.forward(q, k, v, causal=True, feature_map="relu")
    assert not out[:, 2].any()
    assert bool(out.isfinite().all())


def test_half_precision_is_computed_in_float32() -> None:
    q, k, v = inputs(200, 200, dtype=torch.float32)
    halves = [x.bfloat16() for x in (q, k, v)]
    out = linear.forward(*halves, causal=True)
    assert out.dtype == torch.bfloat16
    want = linear.forward(*(x.float() for x in halves), causal=True)
    torch.testing.assert_close(out, want.bfloat16())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_the_written_gradient_is_autograds(causal: bool, normalize: bool, feature_map: FeatureMap) -> None:
    q, k, v = inputs(21, 21)
    if feature_map == "none":
        q, k = q.abs() + 0.1, k.abs() + 0.1
    leaves = [x.requires_grad_() for x in (q, k, v)]
    options = {"causal": causal, "feature_map": feature_map, "normalize": normalize}
    out = linear.forward(q, k, v, chunk_size=8, **options)
    grad_out = torch.randn_like(out)
    want = torch.autograd.grad(out, leaves, grad_out)
    with torch.no_grad():
        got = linear.backward(grad_out, q, k, v, chunk_size=8, **options)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)


def test_autograd_goes_through_the_chunks() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(9, 9, dim=3))
    assert torch.autograd.gradcheck(lambda *x: linear.forward(*x, causal=True, chunk_size=4), (q, k, v))
    assert torch.autograd.gradcheck(linear.forward, (q, k, v))
