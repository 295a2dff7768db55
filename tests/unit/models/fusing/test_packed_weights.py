"""Packed weights: one memory, seen by the modules too, and never used when a module was changed."""

import copy

import pytest
import torch
from fused_models import logits, made
from torch import Tensor, nn

from models.forward import PagedForward
from models.fusing import fuse, report
from models.fusing.linears import JoinedLinears


def storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def linears(*sizes: int, bias: bool = True) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(8, size, bias=bias).requires_grad_(False) for size in sizes]


def outputs(modules: list[nn.Linear], x: Tensor) -> list[Tensor]:
    return [module(x) for module in modules]


@pytest.mark.parametrize("bias", [False, True])
def test_packed_layers_share_one_memory_and_keep_their_values(bias: bool) -> None:
    modules = linears(4, 6, 2, bias=bias)
    x = torch.randn(5, 8)
    values = [module.weight.clone() for module in modules]
    expected = outputs(modules, x)
    joined = JoinedLinears(modules, (4, 6, 2), pack=True)
    assert len({storage(module.weight) for module in modules}) == 1
    assert modules[0].weight.untyped_storage().nbytes() == 12 * 8 * 4  # nothing beside the three
    for module, value in zip(modules, values, strict=True):
        assert torch.equal(module.weight, value)
    for ours, theirs in zip(joined(x), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert len({storage(part) for part in joined(x)}) == 1, "the product was not one"


def test_what_is_packed_is_not_packed_again() -> None:
    modules = linears(4, 4)
    JoinedLinears(modules, (4, 4), pack=True)
    before = [module.weight.data_ptr() for module in modules]
    again = JoinedLinears(modules, (4, 4), pack=True)
    assert [module.weight.data_ptr() for module in modules] == before
    assert len({storage(part) for part in again(torch.randn(2, 8))}) == 1


def test_weights_changed_in_place_are_seen() -> None:
    modules = linears(4, 4)
    joined = JoinedLinears(modules, (4, 4), pack=True)
    with torch.no_grad():
        modules[1].weight.fill_(2.0)
    x = torch.randn(3, 8)
    torch.testing.assert_close(joined(x)[1], modules[1](x))


def test_a_module_with_other_weights_than_the_packed_ones_is_called_itself() -> None:
    modules = linears(4, 4)
    joined = JoinedLinears(modules, (4, 4), pack=True)
    modules[1].weight = nn.Parameter(torch.randn(4, 8))
    x = torch.randn(3, 8)
    torch.testing.assert_close(joined(x)[1], modules[1](x))


def test_layers_that_differ_are_not_packed_and_why() -> None:
    some_bias = [nn.Linear(8, 4), nn.Linear(8, 4, bias=False)]
    mixed = [nn.Linear(8, 4), nn.Linear(8, 4).double()]
    assert JoinedLinears(some_bias, (4, 4), pack=True).refuses() == "some have a bias and some have none"
    assert JoinedLinears(mixed, (4, 4), pack=True).refuses() == "their weights differ in dtype, device or width"
    x = torch.randn(3, 8)
    for ours, theirs in zip(JoinedLinears(some_bias, (4, 4), pack=True)(x), outputs(some_bias, x), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_models_projections_lie_in_one_tensor_a_layer() -> None:
    model = made("qwen2")
    state = copy.deepcopy(model.state_dict())
    fuse(model)
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        assert len({storage(p.weight) for p in (attention.q_proj, attention.k_proj, attention.v_proj)}) == 1
        assert len({storage(p.bias) for p in (attention.q_proj, attention.k_proj, attention.v_proj)}) == 1
        assert len({storage(p.weight) for p in (mlp.gate_proj, mlp.up_proj)}) == 1
    after = model.state_dict()
    assert after.keys() == state.keys()
    assert all(torch.equal(after[name], state[name]) for name in state)


def test_without_packing_weights_stay_where_they_are() -> None:
    model = made("llama")
    before = [parameter.data_ptr() for parameter in model.parameters()]
    decoder = fuse(model, pack=False)
    assert [parameter.data_ptr() for parameter in model.parameters()] == before
    assert report(decoder, model.device).fused


def test_a_copy_of_a_fused_model_is_a_model_of_its_own() -> None:
    model = made("llama")
    expected = logits(model, PagedForward(model))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[0].self_attn.q_proj.weight.zero_()
    assert torch.equal(logits(model, PagedForward(model)), expected)
    torch.testing.assert_close(logits(other, PagedForward(other)), logits(other, PagedForward(other, fused=False)))
