"""Packed sequences never see each other, told by cu_seq_lens or by position ids alone."""

from typing import Any

import pytest
import torch
from patching_families import BY_NAME, tokens
from torch import Tensor

from models.patching import UnsupportedCallError, fix_temperature

LENGTHS = [9, 21, 1, 14]
# gpt_oss does not hand its position ids to its masks, so only cu_seq_lens can tell it what is packed.
CASES = [
    (name, told_by)
    for name in ("llama", "gemma3", "gpt_oss", "llama4", "qwen2_moe", "phimoe")
    for told_by in ("position_ids", "cu_seq_lens")
    if (name, told_by) != ("gpt_oss", "position_ids")
]


def packed() -> tuple[list[Tensor], dict[str, Any]]:
    sequences = [tokens(1, length, seed=length) for length in LENGTHS]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return sequences, {"input_ids": torch.cat(sequences, 1), "position_ids": positions, "use_cache": False}


def boundaries() -> dict[str, Any]:
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    return {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)}


@pytest.mark.parametrize(("name", "told_by"), CASES)
def test_a_packed_row_gives_each_sequence_its_own_logits(name: str, told_by: str) -> None:
    sequences, row = packed()
    model = BY_NAME[name].build()
    with torch.no_grad():
        expected = torch.cat([model(sequence, use_cache=False).logits for sequence in sequences], 1)
        fix_temperature(model)
        model.set_attn_implementation("longwave")
        actual = model(**row, **(boundaries() if told_by == "cu_seq_lens" else {})).logits
    torch.testing.assert_close(actual, expected, atol=3e-5, rtol=1e-4)


def test_cu_seq_lens_are_obeyed_where_position_ids_do_not_tell() -> None:
    """With the cache on, transformers does not look for packing at all."""
    sequences, row = packed()
    model = BY_NAME["llama"].build()
    with torch.no_grad():
        expected = torch.cat([model(sequence).logits for sequence in sequences], 1)
        model.set_attn_implementation("longwave")
        actual = model(**{**row, "use_cache": True}, **boundaries()).logits
    torch.testing.assert_close(actual, expected, atol=3e-5, rtol=1e-4)


def test_two_packed_rows_are_kept_apart() -> None:
    _, row = packed()
    model = BY_NAME["llama"].build()
    both = {"input_ids": row["input_ids"].repeat(2, 1), "position_ids": row["position_ids"], "use_cache": False}
    both["input_ids"][1] = both["input_ids"][1].flip(0)
    with torch.no_grad():
        pieces = both["input_ids"].split(LENGTHS, 1)
        expected = torch.cat([model(piece, use_cache=False).logits for piece in pieces], 1)
        model.set_attn_implementation("longwave")
        actual = model(**both).logits
    torch.testing.assert_close(actual, expected, atol=3e-5, rtol=1e-4)


def test_padding_together_with_cu_seq_lens_is_refused() -> None:
    _, row = packed()
    mask = torch.ones_like(row["input_ids"])
    mask[0, 0] = 0
    model = BY_NAME["llama"].build("longwave")
    with pytest.raises(UnsupportedCallError, match="leave the mask out"):
        model(**row, **boundaries(), attention_mask=mask)


def test_half_of_the_boundaries_is_refused() -> None:
    _, row = packed()
    model = BY_NAME["llama"].build("longwave")
    with pytest.raises(UnsupportedCallError, match="must come together"):
        model(**row, cu_seq_lens_q=boundaries()["cu_seq_lens_q"])
