"""Steps through modules that are not fused: what a family does with the rows that are asked for."""

import pytest
from batch_driver import generate
from tiny_models import as_loaded, random_model
from transformers import CONFIG_MAPPING

from models.runner import ModelRunner


@pytest.mark.skipif("gemma4_text" not in CONFIG_MAPPING, reason="needs Gemma 4")
def test_layers_that_share_keys_see_every_row_of_a_step_that_samples_nothing() -> None:
    config = CONFIG_MAPPING["gemma4_text"](
        vocab_size=120, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, global_head_dim=32, max_position_embeddings=512, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2,
        vocab_size_per_layer_input=120, hidden_size_per_layer_input=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    runner = ModelRunner(
        as_loaded(random_model(config)),
        block_size=16, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128, num_blocks=32,
    )  # fmt: skip
    prompts = [list(range(3, 53))]
    whole, in_chunks = (generate(runner, prompts, 4, budget=budget) for budget in (64, 16))
    assert [request.tokens for request in in_chunks] == [request.tokens for request in whole]
