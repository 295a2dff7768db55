"""The engine's attention: many requests in one flat row over pages give the tokens that each gives alone."""

import pytest
import torch
from paged_steps import generate
from patching_families import BY_NAME, CAUSAL, Family, tokens

from models.patching import UnsupportedCallError, check_supported_for_serving, fix_temperature

PROMPTS = [tokens(length, seed=length).tolist() for length in (5, 33, 1, 18, 50)]
NEW_TOKENS = 10


@pytest.mark.parametrize("family", CAUSAL, ids=lambda family: family.name)
def test_mixed_prefill_and_decode_over_pages_give_the_tokens_of_generate(family: Family, device: torch.device) -> None:
    model = family.build().to(device)
    check_supported_for_serving(model)
    expected = [
        model.generate(torch.tensor([prompt], device=device), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS,
                       do_sample=False, eos_token_id=-1)[0].tolist()
        for prompt in PROMPTS
    ]  # fmt: skip
    fix_temperature(model)
    model.set_attn_implementation("longwave_paged")
    assert generate(model, PROMPTS, NEW_TOKENS, budget=24, device=device) == expected


def test_a_forward_without_pages_is_refused() -> None:
    model = BY_NAME["llama"].build("longwave_paged")
    with pytest.raises(UnsupportedCallError, match="without paged_metadata and kv_caches"):
        model(tokens(1, 4))


def test_a_bidirectional_model_is_refused() -> None:
    model = BY_NAME["bert"].build("longwave_paged")
    with pytest.raises(UnsupportedCallError, match="without paged_metadata"):
        model(tokens(1, 4))
