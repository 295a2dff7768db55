"""Every pattern against its definition, pair by pair, at random lengths; and at a length where no square fits."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_backend import block_patterns
from attention_backend.block_sparsity import BlockSparsity

LENGTH = st.one_of(st.integers(1, 700), st.sampled_from([128, 256, 384, 512]))
LENGTHS = st.one_of(LENGTH.map(lambda n: (n, n)), st.tuples(LENGTH, LENGTH))
BOUND = st.one_of(st.just(-1), st.integers(0, 400))
SETTINGS = settings(deadline=None, max_examples=50)


def places(seqlen_q: int, seqlen_k: int) -> tuple[Tensor, Tensor]:
    """Positions `[seqlen_q, 1]` and keys `[1, seqlen_k]`."""
    return torch.arange(seqlen_k - seqlen_q, seqlen_k)[:, None], torch.arange(seqlen_k)[None]


def assert_exact(sparsity: BlockSparsity, mask: Tensor) -> None:
    """The same lists as from the mask itself, which test_block_lists holds to the definition."""
    truth = BlockSparsity.from_mask(mask)
    assert torch.equal(sparsity.counts, truth.counts)
    assert torch.equal(sparsity.blocks, truth.blocks)
    assert torch.equal(sparsity.to_mask(), mask)
    assert sparsity.bits.shape == truth.bits.shape


@SETTINGS
@given(LENGTHS)
def test_causal_is_bottom_right(lengths: tuple[int, int]) -> None:
    p, j = places(*lengths)
    assert_exact(block_patterns.causal(*lengths), (j <= p)[None, None])


@SETTINGS
@given(LENGTHS, BOUND, BOUND, st.booleans(), st.integers(0, 200), st.booleans(), st.integers(0, 2**31))
def test_sliding_window_with_global_tokens(
    lengths: tuple[int, int], left: int, right: int, causal: bool, tokens: int, scattered: bool, seed: int
) -> None:
    p, j = places(*lengths)
    tokens = min(tokens, lengths[1])
    some = torch.randint(0, lengths[1], (tokens % 4,), generator=torch.Generator().manual_seed(seed))
    is_global = torch.zeros(lengths[1], dtype=torch.bool)
    is_global[some if scattered else slice(0, tokens)] = True
    mask = ((left < 0) | (j >= p - left)) & ((right < 0) | (j <= p + right))
    mask = mask | is_global[None] | ((p >= 0) & is_global[p.clamp_min(0)])
    if causal:
        mask = mask & (j <= p)
    sparsity = block_patterns.sliding_window(
        *lengths, window=(left, right), causal=causal, global_tokens=some if scattered else tokens
    )
    assert_exact(sparsity, mask[None, None])


@SETTINGS
@given(
    LENGTHS,
    st.integers(0, 6),
    st.integers(0, 3),
    st.lists(st.sampled_from([1, 2, 3, 64, 130, 200]), min_size=1, max_size=3),
)
def test_dilated_window_of_each_head(lengths: tuple[int, int], left: int, right: int, dilations: list[int]) -> None:
    p, j = places(*lengths)
    masks = [((j - p) % d == 0) & (j >= p - left * d) & (j <= p + right * d) for d in dilations]
    sparsity = block_patterns.dilated_window(*lengths, window=(left, right), dilation=dilations)
    assert_exact(sparsity, torch.stack(masks)[None])


@SETTINGS
@given(LENGTHS, st.lists(st.integers(0, 700), min_size=1, max_size=3))
def test_prefix_lm_of_each_sequence(lengths: tuple[int, int], prefixes: list[int]) -> None:
    p, j = places(*lengths)
    masks = torch.stack([(j <= p) | (j < prefix) for prefix in prefixes])
    assert_exact(block_patterns.prefix_lm(prefixes, *lengths), masks[:, None])


@SETTINGS
@given(LENGTH, st.integers(1, 9), st.sampled_from(["sorted", "mixed", "blocks"]), st.booleans(), st.integers(0, 2**31))
def test_documents_in_any_order_with_padding(length: int, number: int, order: str, causal: bool, seed: int) -> None:
    ids = torch.randint(-1, number, (2, length), generator=torch.Generator().manual_seed(seed))
    if order == "sorted":
        ids = ids.sort(1).values
    elif order == "blocks":
        ids = ids.repeat_interleave(128, 1)[:, :length]
    mask = (ids[:, :, None] == ids[:, None]) & (ids[:, :, None] >= 0)
    if causal:
        mask = mask.tril()
    assert_exact(block_patterns.documents(ids, causal=causal), mask[:, None])


def test_document_lengths_leave_the_rest_alone() -> None:
    mask = torch.block_diag(*(torch.ones(n, n) for n in (100, 28, 300))).bool()
    mask = torch.nn.functional.pad(mask, (0, 72, 0, 72))
    assert_exact(block_patterns.document_lengths([100, 28, 300], 500, causal=False), mask[None, None])


@SETTINGS
@given(LENGTH, st.integers(1, 500), st.integers(1, 500))
def test_fixed_sees_its_stretch_and_the_summaries(length: int, stride: int, summary: int) -> None:
    p, j = places(length, length)
    summary = min(summary, stride)
    mask = (j <= p) & ((j // stride == p // stride) | (j % stride >= stride - summary))
    assert_exact(block_patterns.fixed(length, stride=stride, summary=summary), mask[None, None])


@SETTINGS
@given(LENGTHS, st.booleans())
def test_butterfly_sees_one_flipped_bit(lengths: tuple[int, int], causal: bool) -> None:
    p, j = places(*lengths)
    steps = (torch.arange(lengths[0])[:, None] // 128) ^ (j // 128)
    mask = torch.isin(steps, torch.tensor([0, 1, 2, 4, 8]))
    assert_exact(block_patterns.butterfly(*lengths, causal=causal), (mask & (j <= p) if causal else mask)[None, None])


LONG = 1 << 18  # its mask would take 64 GiB
LONG_PATTERNS: dict[str, tuple[Callable[[], BlockSparsity], float]] = {
    "causal": (lambda: block_patterns.causal(LONG), 0.5003),
    "longformer": (lambda: block_patterns.sliding_window(LONG, window=(512, 512), global_tokens=64), 0.0054),
    "documents": (lambda: block_patterns.document_lengths([LONG // 16] * 16, causal=False), 0.0626),
    "fixed": (lambda: block_patterns.fixed(LONG, stride=2048, summary=128), 0.036),
    "butterfly": (lambda: block_patterns.butterfly(LONG), 0.0059),
}


@pytest.mark.parametrize("name", LONG_PATTERNS)
def test_long_patterns_have_their_density(name: str) -> None:
    make, density = LONG_PATTERNS[name]
    assert 0 < make().density < density


def test_arguments_that_make_no_pattern_are_refused() -> None:
    bad: list[Callable[[], BlockSparsity]] = [
        lambda: block_patterns.sliding_window(10, window=(-2, 0)),
        lambda: block_patterns.sliding_window(10, window=(0, 0), global_tokens=11),
        lambda: block_patterns.sliding_window(10, window=(0, 0), global_tokens=torch.tensor([10])),
        lambda: block_patterns.dilated_window(10, window=(1, 1), dilation=0),
        lambda: block_patterns.dilated_window(10, window=(-1, 1), dilation=2),
        lambda: block_patterns.prefix_lm(torch.ones(1, 1), 10),
        lambda: block_patterns.documents(torch.ones(1, 1, 1)),
        lambda: block_patterns.document_lengths([5, 6], 10),
        lambda: block_patterns.document_lengths([5, -1], 10),
        lambda: block_patterns.fixed(10, stride=4, summary=5),
        lambda: block_patterns.causal(0),
    ]
    for make in bad:
        with pytest.raises(ValueError):
            make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: block_patterns.documents(torch.tensor([0.2, 0.7])),
            "document_ids must be whole numbers, got torch.float",
        ),
        (lambda: block_patterns.documents(torch.tensor([True])), "document_ids must be whole numbers, got torch.bool"),
        (lambda: block_patterns.document_lengths([2.5]), "lengths must be whole numbers"),
        (lambda: block_patterns.prefix_lm([5.5], 10), "prefix_lengths must be whole numbers"),
        (lambda: block_patterns.dilated_window(10, window=(1, 1), dilation=[1.5]), "dilation must be whole numbers"),
        (lambda: block_patterns.dilated_window(10, window=(1, 0.5), dilation=1), r"window must be two ints"),
        (lambda: block_patterns.sliding_window(10, window=5), r"window must be two ints"),
        (lambda: block_patterns.sliding_window(10, window=(2.5, 0)), r"window must be two ints"),
        (
            lambda: block_patterns.sliding_window(9, window=(1, 1), global_tokens=torch.ones(9)),
            "global_tokens must be who",
        ),
    ],
)
def test_what_counts_is_a_whole_number(make: Callable[[], BlockSparsity], message: str) -> None:
    """A fraction that was cut off would join documents that must not meet."""
    with pytest.raises(TypeError, match=f"^{message}"):
        make()


def test_documents_of_no_length_are_none() -> None:
    assert_exact(block_patterns.document_lengths([], 3), torch.zeros(1, 1, 3, 3, dtype=torch.bool))
    assert_exact(block_patterns.document_lengths([0, 3]), torch.ones(1, 1, 3, 3, dtype=torch.bool).tril())
