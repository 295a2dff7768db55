"""Top-k, top-p and min-p against a plain per-row construction."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.sampling.filters import apply_min_p, apply_top_k_top_p


def _kept(row: list[float], top_k: int, top_p: float) -> set[int]:
    """By the definition: the k largest, then the fewest of them that reach top_p of their mass."""
    order = sorted(range(len(row)), key=lambda i: -row[i])[:top_k]
    if top_p >= 1:
        return set(order)
    whole = math.fsum(math.exp(row[i]) for i in order)
    kept: set[int] = set()
    for i in order:
        kept.add(i)
        if math.fsum(math.exp(row[j]) for j in kept) >= top_p * whole:
            break
    return kept


def _filter(logits: torch.Tensor, top_k: list[int], top_p: list[float], largest_k: int | None = None) -> list[set[int]]:
    out = apply_top_k_top_p(logits.clone(), torch.tensor(top_k), torch.tensor(top_p), largest_k=largest_k)
    return [set(row.isfinite().nonzero().flatten().tolist()) for row in out]


@pytest.mark.parametrize("vocab_size", [5, 300, 4000])
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_top_k_and_top_p_keep_what_the_definition_keeps(vocab_size: int, data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**31))
    scale = data.draw(st.sampled_from([0.01, 1.0, 5.0]))
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale
    bound = st.one_of(st.integers(1, min(60, vocab_size)), st.just(vocab_size), st.integers(1, vocab_size))
    top_k = data.draw(st.lists(bound, min_size=3, max_size=3))
    top_p = data.draw(st.lists(st.sampled_from([0.03, 0.21, 0.507, 0.913, 1.0]), min_size=3, max_size=3))
    expected = [_kept(row, k, p) for row, k, p in zip(logits.tolist(), top_k, top_p, strict=True)]
    for largest_k in (None, max(top_k)):
        for kept, wanted in zip(_filter(logits, top_k, top_p, largest_k), expected, strict=True):
            assert len(kept ^ wanted) <= 1 if vocab_size == 4000 else kept == wanted  # float32 mass at the border


def test_a_tiny_top_p_keeps_the_most_likely_token() -> None:
    assert _filter(torch.tensor([[1.0, 3.0, 2.0]]), [3], [1e-9]) == [{1}]


def test_tokens_that_tie_with_the_last_kept_one_stay() -> None:
    assert _filter(torch.tensor([[1.0, 2.0, 1.0, 0.0]]), [2], [1.0]) == [{0, 1, 2}]


def test_top_p_one_keeps_everything() -> None:
    assert _filter(torch.zeros(1, 5000), [5000], [1.0]) == [set(range(5000))]


def test_flat_distributions_wider_than_the_prefix_are_filtered_exactly() -> None:
    logits = torch.arange(5000, 0, -1).float()[None] * 1e-4
    assert _filter(logits, [5000], [0.9]) == [_kept(logits[0].tolist(), 5000, 0.9)]


def test_masked_tokens_never_come_back() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0, -torch.inf]])
    assert _filter(logits, [4], [0.999999]) == [{0, 2}]


def test_min_p_keeps_tokens_of_at_least_that_share_of_the_largest() -> None:
    logits = torch.tensor([[0.6, 0.3, 0.07, 0.03], [0.6, 0.3, 0.07, 0.03]]).log()
    out = apply_min_p(logits, torch.tensor([0.1, 0.0]))
    assert out.isfinite().tolist() == [[True, True, True, False], [True] * 4]
