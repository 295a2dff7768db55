"""The descriptor says what transformers' closure says, for every closure, and grows with the length only."""

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import masking_utils

from attention_backend.problem import FURTHEST
from models.patching import UnsupportedCallError
from models.patching.descriptor import decode, encode_rows
from models.patching.mask import MAX_DENSE_KEYS, longwave_mask
from models.patching.rule import MaskRule, classify, describe


def visible(mask: Tensor, batch: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """bool `[batch, seqlen_q, seqlen_k]`: the rule of `AttentionArgs`, written out."""
    read = decode(mask, batch, seqlen_q, seqlen_k)
    start, stop, offset, left, right, chunk = (column[:, None, None].long() for column in read.desc[:, :6].unbind(1))
    p, j = torch.arange(seqlen_q)[None, :, None] + offset, torch.arange(seqlen_k)[None, None, :]
    seen = (j >= start) & (j < stop)
    seen = seen & ((left < 0) | (j >= p - left))
    seen = seen & ((right < 0) | (j <= p + right))
    size = chunk.clamp(min=1)
    seen &= (chunk == 0) | (
        (j - start).div(size, rounding_mode="floor") == (p - start).div(size, rounding_mode="floor")
    )
    return seen if read.key_mask is None else seen & read.key_mask[:, None, :]


def written_out(arguments: dict[str, Any]) -> Tensor:
    mask = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)
    assert mask is not None
    return mask[:, 0]


@st.composite
def mask_calls(draw: st.DrawFn) -> dict[str, Any]:
    """Calls as caches make them: keys up to the last query, the oldest ones perhaps dropped, free slots at the end."""
    batch, q_length, past = draw(st.integers(1, 3)), draw(st.integers(1, 12)), draw(st.integers(0, 20))
    free = draw(st.sampled_from([0, 0, 5]))
    total = past + q_length
    padding = None
    if draw(st.booleans()):
        padding = torch.tensor(
            draw(st.lists(st.lists(st.booleans(), min_size=total, max_size=total), min_size=batch, max_size=batch))
        )
    size = draw(st.integers(1, 9))
    left_padding = torch.zeros(batch, dtype=torch.int64)
    if padding is not None:
        left_padding = (padding.cumsum(-1) == 0).sum(-1)
    # A cache drops only keys that no query of the call can see.
    dropped, function = draw(
        st.sampled_from(
            [
                (0, masking_utils.causal_mask_function),
                (0, masking_utils.bidirectional_mask_function),
                (max(past - size + 1, 0), masking_utils.sliding_window_causal_mask_function(size)),
                (0, masking_utils.sliding_window_bidirectional_mask_function(size)),
                (max(past - size + 1, 0), masking_utils.chunked_causal_mask_function(size, left_padding)),
            ]
        )
    )
    return {
        "batch_size": batch,
        "q_length": q_length,
        "kv_length": total - dropped + free,
        "q_offset": draw(st.sampled_from([past, torch.tensor(past)])),
        "kv_offset": dropped,
        "mask_function": function,
        "attention_mask": padding,
    }


@settings(max_examples=300, deadline=None)
@given(mask_calls())
def test_descriptor_equals_the_evaluated_closure(call: dict[str, Any]) -> None:
    mask = longwave_mask(**call)
    assert mask.dtype == torch.int32
    assert mask.dim() == 4
    expected = written_out(call)
    actual = visible(mask, call["batch_size"], call["q_length"], call["kv_length"])
    if call["attention_mask"] is None:  # free slots of a static cache lie after every causal query
        assert torch.equal(actual, expected)
    else:
        # A query that is padding itself may stand before its row's first chunk: nobody reads it.
        rows = call["attention_mask"][:, -call["q_length"] :]
        assert torch.equal(actual[rows], expected[rows])


@pytest.mark.parametrize("side", ["left", "right"])
def test_one_sided_padding_on_the_cpu_needs_no_key_mask(side: str) -> None:
    padding = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], dtype=torch.bool)
    padding = padding if side == "left" else padding.flip(1)
    assert longwave_mask(2, 5, 5, attention_mask=padding).shape == (2, 1, 1, 8)


def test_a_mask_of_a_long_sequence_takes_a_byte_a_key_at_most() -> None:
    padding = torch.ones(1, 100_000, dtype=torch.bool)
    padding[0, 5] = False
    assert longwave_mask(1, 100_000, 100_000, attention_mask=padding).nbytes <= 100_000 + 64


def test_survives_contiguous_and_to() -> None:
    padding = torch.tensor([[1, 0, 1, 1, 1, 1, 0]], dtype=torch.bool)
    mask = longwave_mask(1, 7, 7, attention_mask=padding)
    moved = mask.clone().contiguous().to("cpu")
    assert torch.equal(visible(moved, 1, 7, 7), visible(mask, 1, 7, 7))


def test_unions_of_nested_patterns_are_the_wider_one() -> None:
    sliding = masking_utils.sliding_window_causal_mask_function(4)
    union = masking_utils.or_masks(sliding, masking_utils.causal_mask_function)
    assert classify(union) == MaskRule(right=0)
    assert classify(masking_utils.or_masks(masking_utils.bidirectional_mask_function, union)) == MaskRule()


def test_windows_wider_than_any_length_are_cut_to_what_kernels_add_up() -> None:
    rule = MaskRule(left=2**40, right=2**31 - 1, chunk=2**31 - 1)
    desc = encode_rows(rule, 2, 3, 9, 6, 0, torch.device("cpu"))
    assert desc[:, :6].tolist() == [[0, 9, 6, FURTHEST, FURTHEST, FURTHEST]] * 2


def test_intersections_take_the_narrower_window() -> None:
    both = masking_utils.and_masks(
        masking_utils.sliding_window_overlay(4), masking_utils.sliding_window_causal_mask_function(7)
    )
    assert classify(both) == MaskRule(left=3, right=0)


def prefix_of_three(_batch: Tensor, _head: Tensor, _q: Tensor, kv: Tensor) -> Tensor:
    return kv < 3


def test_an_unknown_pattern_is_written_out_exactly_while_it_is_short() -> None:
    function = masking_utils.or_masks(masking_utils.causal_mask_function, prefix_of_three)
    padding = torch.tensor([[0, 1, 1, 1, 1, 1]], dtype=torch.bool)
    call = {"batch_size": 1, "q_length": 6, "kv_length": 6, "mask_function": function, "attention_mask": padding}
    mask = longwave_mask(**call)
    assert torch.equal(mask[:, 0] == 0, written_out(call))


def test_an_unknown_pattern_of_a_long_sequence_is_refused_by_name() -> None:
    function = masking_utils.or_masks(masking_utils.causal_mask_function, prefix_of_three)
    config = type("Config", (), {"model_type": "paligemma"})()
    with pytest.raises(UnsupportedCallError, match=r"paligemma asks for .*or_masks\(causal_mask_function.*prefix_of"):
        longwave_mask(1, 8, MAX_DENSE_KEYS + 1, mask_function=function, config=config)


def test_names_of_closures_can_be_searched_for() -> None:
    assert describe(masking_utils.sliding_window_causal_mask_function(4)) == (
        "and_masks(sliding_window_overlay, causal_mask_function)"
    )


def test_a_mask_changed_on_the_way_is_refused() -> None:
    mask = longwave_mask(2, 12, 12)
    with pytest.raises(UnsupportedCallError, match="changed its attention mask"):
        decode(mask[..., :6], 2, 12, 12)
    with pytest.raises(UnsupportedCallError, match="made for 12 queries and 12 keys"):
        decode(mask, 2, 12, 13)


def test_families_that_compute_with_their_mask_are_refused() -> None:
    config = type("Config", (), {"model_type": "deepseek_v32"})()
    with pytest.raises(UnsupportedCallError, match="deepseek_v32 computes with its attention mask"):
        longwave_mask(1, 4, 4, config=config)


def test_masks_without_values_are_made_and_read() -> None:
    """Padding then always travels as a key mask, and nothing is compared."""
    with FakeTensorMode():
        padding = torch.ones(2, 12, dtype=torch.bool)
        mask = longwave_mask(2, 12, 12, attention_mask=padding)
        key_mask = decode(mask, 2, 12, 12).key_mask
    assert mask.shape == (2, 1, 1, 8 + 3)
    assert key_mask is not None
    assert key_mask.shape == (2, 12)


def test_a_mask_option_it_does_not_know_is_refused() -> None:
    with pytest.raises(UnsupportedCallError, match="global_tokens"):
        longwave_mask(1, 4, 4, global_tokens=3)


@pytest.mark.gpu
def test_making_and_reading_a_padded_mask_never_waits_for_the_gpu() -> None:
    padding = torch.ones(2, 64, dtype=torch.bool, device="cuda")
    padding[0, :9] = False
    offset = torch.tensor(0, device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
    try:
        mask = longwave_mask(2, 64, 64, q_offset=offset, attention_mask=padding, device="cuda")
        read = decode(mask, 2, 64, 64)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert read.key_mask is not None
    assert torch.equal(read.key_mask, padding)
    assert read.desc[0, :2].tolist() == [9, 64]
