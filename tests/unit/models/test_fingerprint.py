"""Two engines share blocks on disk only when every bit that a key or value depends on is the same."""

import pytest
import torch
from tiny_models import as_loaded, random_model, tiny_config
from transformers import PreTrainedModel

from models import fingerprint as module
from models.attention_sites import find_attention_sites
from models.fingerprint import fingerprint
from models.kv_pool import allocate
from models.packed_linear import pack_linears
from models.runner import ModelRunner


def of(
    model: PreTrainedModel,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    length: int = 256,
    scale: float = 0,
) -> bytes:
    sites = find_attention_sites(model)
    scales = [(torch.full((site.num_kv_heads,), scale),) * 2 for site in sites] if scale else None
    kv_caches = allocate(sites, 2, block_size, torch.float8_e4m3fn if scale else dtype, model.device, scales)
    return fingerprint(model, kv_caches, max_model_len=length)


def test_the_same_weights_give_the_same_fingerprint() -> None:
    assert of(random_model(tiny_config())) == of(random_model(tiny_config()))
    assert len(of(random_model(tiny_config()))) == 32


def test_every_other_thing_gives_another_one() -> None:
    model = random_model(tiny_config())
    seen = {
        of(model),
        of(model, block_size=32),
        of(model, dtype=torch.bfloat16),
        of(model, scale=0.5),
        of(model, scale=0.25),
        of(model, length=512),
        of(random_model(tiny_config(rope_parameters={"rope_type": "default", "rope_theta": 5e5}))),
    }
    assert len(seen) == 7


@pytest.mark.parametrize("packed", [False, True])
def test_one_bit_of_one_weight_shows(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_WORDS", 100)  # so that weights have several parts
    plain, changed = (random_model(tiny_config()) for _ in range(2))
    weight = changed.get_submodule("model.layers.1.mlp.up_proj").weight
    weight.data.view(torch.int32)[5, 7] ^= 1
    if packed:
        pack_linears(plain)
        pack_linears(changed)
    assert of(plain) != of(changed)


def test_weights_in_another_order_show() -> None:
    plain, changed = (random_model(tiny_config()) for _ in range(2))
    weight = changed.get_submodule("model.embed_tokens").weight
    weight.data = weight.data.flip(0).contiguous()
    assert of(plain) != of(changed)


def test_making_a_runner_of_it_changes_nothing() -> None:
    model = random_model(tiny_config())
    before = of(model)
    ModelRunner(
        as_loaded(model), block_size=16, max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64, num_blocks=9
    )
    assert of(model) == before
