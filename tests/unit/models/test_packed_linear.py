"""Packed layers compute what the plain ones do."""

import pytest
import torch
from tiny_models import random_model, tiny_config
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from models.packed_linear import PackedLinear, pack_linears, padded_rows


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 8, 17, 200, 300])
@pytest.mark.parametrize(("fan_in", "fan_out"), [(64, 96), (33, 7), (576, 1536)])
def test_a_packed_layer_equals_the_plain_one(fan_in: int, fan_out: int, rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(fan_in, fan_out, bias=bias).requires_grad_(False)
    x = torch.randn(1, rows, fan_in)
    packed = PackedLinear(linear)
    torch.testing.assert_close(packed(x), linear(x), atol=1e-5, rtol=1e-5)
    assert torch.equal(packed.weight, linear.weight)


def test_a_product_has_an_eighth_more_rows_at_most_and_few_numbers_of_them() -> None:
    assert [padded_rows(count) for count in range(17)] == list(range(17))
    assert all(count <= padded_rows(count) <= count * 9 / 8 for count in range(4096))
    assert len({padded_rows(count) for count in range(513)}) == 57


def test_other_numbers_of_rows_need_no_other_product() -> None:
    class Products(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.rows = set()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "linear_pointwise" in str(function):
                self.rows.add(len(args[0]))
            return function(*args, **(kwargs or {}))

    layer = PackedLinear(nn.Linear(64, 32).requires_grad_(False))
    with Products() as products:
        for rows in range(257, 289):
            assert layer(torch.randn(1, rows, 64)).shape == (1, rows, 32)
    assert products.rows == {288}


def test_rows_that_are_a_slice_of_something_larger_are_read_right() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 32).requires_grad_(False)
    x = torch.randn(1, 6, 128)[..., 32:96]
    torch.testing.assert_close(PackedLinear(linear)(x), linear(x), atol=1e-5, rtol=1e-5)


def test_a_models_logits_stay_and_tied_embeddings_too() -> None:
    model = random_model(tiny_config(tie_word_embeddings=True)).requires_grad_(False)
    model.set_attn_implementation("eager")
    ids = torch.arange(10)[None]
    before, embeddings = model(ids).logits, model.get_input_embeddings().weight
    assert pack_linears(model) == 3 * 7 + 1
    torch.testing.assert_close(model(ids).logits, before, atol=1e-4, rtol=1e-4)
    assert model.get_input_embeddings().weight is embeddings
    assert pack_linears(model) == 0


@pytest.mark.parametrize("rows", [1, 8, 200])
def test_bfloat16_is_packed_where_the_cpu_has_it(rows: int) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(576, 192, dtype=torch.bfloat16).requires_grad_(False)
    model = nn.Sequential(linear)
    assert pack_linears(model) == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    x = torch.randn(rows, 576).bfloat16()
    exact = x.double() @ linear.weight.double().T + linear.bias.double()
    error, plain = ((y.double() - exact).abs().max() for y in (model(x), linear(x)))
    assert error <= 2 * plain


@pytest.mark.parametrize("bias", [False, True])
def test_layers_laid_out_together_compute_what_they_did_and_know_their_weights(bias: bool) -> None:
    torch.manual_seed(0)
    linears = [nn.Linear(33, size, bias=bias).requires_grad_(False) for size in (16, 7, 40)]
    x = torch.randn(5, 33)
    layers = [PackedLinear(linear) for linear in linears]
    for _ in range(2):  # a second time it is done
        PackedLinear.join(layers)
        whole = layers[0].whole(x).split([16, 7, 40], dim=1)
        for linear, layer, part in zip(linears, layers, whole, strict=True):
            torch.testing.assert_close(layer(x), linear(x), atol=1e-5, rtol=1e-5)
            assert torch.equal(layer(x), part)
            assert torch.equal(layer.weight, linear.weight)
    stranger = PackedLinear(linears[0])
    assert layers[0].lies_with(layers[2])
    assert not stranger.lies_with(layers[0])


def test_other_dtypes_and_subclasses_are_left_alone() -> None:
    class Scaled(nn.Linear):
        pass

    assert pack_linears(nn.Sequential(nn.Linear(8, 8, dtype=torch.float16), Scaled(8, 8))) == 0
