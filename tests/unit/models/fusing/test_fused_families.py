"""Every fused family answers what its own modules answer, in every kind of step."""

import pytest
import torch
from fused_models import CONFIGS, logits, made

from models.attention_sites import find_attention_sites
from models.forward import PagedForward
from models.fusing import fuse


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("sampled", [False, True], ids=["every row", "sampled rows"])
def test_logits_are_those_of_the_modules(name: str, sampled: bool) -> None:
    model = made(name)
    expected = logits(model, PagedForward(model, fused=False), sampled=sampled)
    forward = PagedForward(model)
    ours = logits(model, forward, sampled=sampled)
    assert expected.std() > 0.1
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    assert forward.fused.unfused == {}


@pytest.mark.parametrize("name", CONFIGS)
def test_in_bfloat16_the_layers_round_where_the_modules_round(name: str) -> None:
    """Only products over other tile sizes may differ, by far less than one rounding elsewhere makes over the layers."""
    model = made(name, torch.bfloat16)
    expected = logits(model, PagedForward(model, fused=False))
    ours = logits(model, PagedForward(model))
    torch.testing.assert_close(ours, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_modules_are_not_called(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(name)
    forward, sites = PagedForward(model), find_attention_sites(model)

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a decoder layer was called as a module")

    for layer in model.model.layers:
        monkeypatch.setattr(type(layer), "forward", fail)
        monkeypatch.setattr(type(layer.mlp), "forward", fail)
        monkeypatch.setattr(type(layer.input_layernorm), "forward", fail)
    assert logits(model, forward, sites=sites).isfinite().all()


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3"])
def test_eager_logits_are_bitwise_what_they_were_before_fusing(name: str) -> None:
    model = made(name)
    model.set_attn_implementation("eager")
    ids = torch.arange(20)[None]
    before = model(input_ids=ids, use_cache=False).logits
    fuse(model)
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)
