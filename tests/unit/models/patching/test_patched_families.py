"""Every promised family gives eager attention's logits and tokens, whatever the padding and the cache."""

import inspect
from typing import Any

import pytest
import torch
from patching_families import CAUSAL, ENCODERS, SEQ2SEQ, Family, padding, tokens
from torch import Tensor
from transformers.masking_utils import create_chunked_causal_mask

BATCH, LENGTH, NEW_TOKENS = 3, 40, 12
# transformers 5.17 calls it with an argument that it does not take.
CHUNKED_MASKS_FOR_GENERATE = "block_sequence_ids" in inspect.signature(create_chunked_causal_mask).parameters
TOLERANCE = {"atol": 3e-5, "rtol": 1e-4}


def both(family: Family, device: torch.device, call: Any) -> tuple[Any, Any]:
    """`call(model)` with eager attention and with ours."""
    model = family.build().to(device)
    with torch.no_grad():
        expected = call(model)
        model.set_attn_implementation("longwave")
        return expected, call(model)


def generate(model: Any, **inputs: Any) -> Tensor:
    return model.generate(
        **inputs, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, disable_compile=True
    )


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", [*CAUSAL, *ENCODERS], ids=lambda family: family.name)
def test_logits_of_valid_positions_equal_eager(family: Family, side: str, device: torch.device) -> None:
    ids, mask = tokens(BATCH, LENGTH).to(device), padding(BATCH, LENGTH, side).to(device)

    def call(model: Any) -> Tensor:
        output = model(input_ids=ids, attention_mask=mask)
        return output.logits if hasattr(output, "logits") else output.last_hidden_state

    expected, actual = both(family, device, call)
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], **TOLERANCE)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("family", CAUSAL, ids=lambda family: family.name)
def test_greedy_generation_from_left_padded_prompts_equals_eager(
    family: Family, cache: str | None, device: torch.device
) -> None:
    if cache == "static" and family.name == "llama4" and not CHUNKED_MASKS_FOR_GENERATE:
        pytest.skip("this transformers cannot make chunked masks for a static cache, whatever the attention")
    ids, mask = tokens(BATCH, LENGTH).to(device), padding(BATCH, LENGTH, "left").to(device)
    expected, actual = both(
        family,
        device,
        lambda model: generate(model, input_ids=ids, attention_mask=mask, cache_implementation=cache),
    )
    assert actual.tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4"])
def test_chunked_prefill_over_a_sliding_cache_equals_eager(name: str) -> None:
    family = next(family for family in CAUSAL if family.name == name)
    ids, mask = tokens(BATCH, LENGTH), padding(BATCH, LENGTH, "left")
    expected, actual = both(
        family,
        torch.device("cpu"),
        lambda model: generate(model, input_ids=ids, attention_mask=mask, prefill_chunk_size=7),
    )
    assert actual.tolist() == expected.tolist()


@pytest.mark.parametrize("family", SEQ2SEQ, ids=lambda family: family.name)
def test_encoder_decoders_with_padding_holes_equal_eager(family: Family, device: torch.device) -> None:
    ids, mask = tokens(BATCH, LENGTH).to(device), padding(BATCH, LENGTH, "right").to(device)
    mask[0, 9:12] = 0  # a hole
    decoder_ids, decoder_mask = tokens(BATCH, 21, seed=1).to(device), torch.ones(BATCH, 21, dtype=torch.long)
    decoder_mask[1, -5:] = 0
    decoder_mask[2, 3] = 0
    inputs = {
        "input_ids": ids,
        "attention_mask": mask,
        "decoder_input_ids": decoder_ids,
        "decoder_attention_mask": decoder_mask.to(device),
    }
    expected, actual = both(family, device, lambda model: model(**inputs).logits)
    valid = decoder_mask.bool()
    torch.testing.assert_close(actual[valid], expected[valid], **TOLERANCE)
    expected, actual = both(family, device, lambda model: generate(model, **inputs))
    assert actual.tolist() == expected.tolist()
