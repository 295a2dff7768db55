"""One call of the attention function: every option is computed or refused, nothing is dropped and nothing copied."""

from typing import Any

import pytest
import torch
from patching_families import BY_NAME, tokens
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from models.patching import UnsupportedCallError
from models.patching.attention import MAX_BIAS_ELEMENTS, longwave_attention
from models.patching.layout import tokens_first
from models.patching.mask import longwave_mask


class Layer(nn.Module):
    def __init__(self, is_causal: bool = True) -> None:
        super().__init__()
        self.is_causal = is_causal


def qkv(
    batch: int = 2, heads: int = 4, kv_heads: int = 2, q: int = 5, k: int = 5, dim: int = 16
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(batch, h, n, dim, generator=generator) for h, n in ((heads, q), (kv_heads, k), (kv_heads, k))
    )
    return query, key, value


def standard(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * query.shape[-1] ** -0.5 + bias
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("option", ["head_mask", "indices", "block_indices", "sinks", "alibi"])
def test_an_option_it_does_not_know_is_refused(option: str) -> None:
    with pytest.raises(UnsupportedCallError, match=f"Layer passes {option}="):
        longwave_attention(Layer(), *qkv(), None, **{option: torch.ones(1)})


def test_options_that_are_none_or_harmless_are_accepted() -> None:
    out, weights = longwave_attention(Layer(), *qkv(), None, indices=None, use_cache=True, output_attentions=False)
    assert out.shape == (2, 5, 4, 16)
    assert weights is None


def test_attention_weights_cannot_be_asked_for() -> None:
    with pytest.raises(UnsupportedCallError, match="output_attentions"):
        longwave_attention(Layer(), *qkv(), None, output_attentions=True)


def test_dropout_acts_in_training_and_follows_torch_s_seed() -> None:
    def run(layer: Layer, seed: int) -> Tensor:
        torch.manual_seed(seed)
        return longwave_attention(layer, *qkv(), None, dropout=0.5)[0]

    plain, _ = longwave_attention(Layer(), *qkv(), None)
    dropped = run(Layer().train(), seed=3)
    assert torch.equal(run(Layer().eval(), seed=3), plain)
    assert torch.equal(run(Layer().train(), seed=3), dropped)
    assert not torch.equal(run(Layer().train(), seed=4), dropped)
    # The first row sees one key: its probability 1 became 0 or, at p = 128 / 256, twice as much.
    first = (dropped[:, 0] / plain[:, 0]).round(decimals=4)
    assert set(first.flatten().tolist()) <= {0.0, 2.0}


def test_the_mean_over_dropouts_is_attention_without() -> None:
    plain, _ = longwave_attention(Layer(), *qkv(), None)
    torch.manual_seed(0)
    query, key, value = qkv()
    many = [longwave_attention(Layer().train(), query, key, value, None, dropout=0.25)[0] for _ in range(2000)]
    torch.testing.assert_close(torch.stack(many).mean(0), plain, atol=0.06, rtol=0)


@pytest.mark.parametrize(
    ("module_causal", "argument", "causal"), [(True, None, True), (False, None, False), (True, False, False)]
)
def test_without_a_mask_causality_is_the_argument_then_the_module(
    module_causal: bool, argument: bool | None, causal: bool
) -> None:
    inputs = qkv(q=3, k=7)
    out, _ = longwave_attention(Layer(module_causal), *inputs, None, is_causal=argument)
    hidden = torch.ones(3, 7, dtype=torch.bool).tril(4).logical_not() if causal else torch.zeros(3, 7, dtype=torch.bool)
    torch.testing.assert_close(out, standard(*inputs, torch.zeros(3, 7).masked_fill(hidden, float("-inf"))))


def test_without_a_mask_a_window_counts_the_query_itself() -> None:
    inputs = qkv(q=6, k=6)
    out, _ = longwave_attention(Layer(), *inputs, None, sliding_window=2)
    seen = torch.ones(6, 6, dtype=torch.bool).tril() & torch.ones(6, 6, dtype=torch.bool).triu(-1)
    torch.testing.assert_close(out, standard(*inputs, torch.zeros(6, 6).masked_fill(~seen, float("-inf"))))


def test_masks_written_out_by_the_caller_are_obeyed() -> None:
    inputs = qkv()
    seen = torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(1)) > 0.4
    seen[..., 0] = True
    bias = torch.zeros(2, 1, 5, 5).masked_fill(~seen, float("-inf"))
    for mask in (seen, bias):
        out, _ = longwave_attention(Layer(), *inputs, mask)
        torch.testing.assert_close(out, standard(*inputs, bias))


def test_a_row_that_sees_nothing_gives_zeros() -> None:
    padding = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], dtype=torch.bool)
    out, _ = longwave_attention(Layer(), *qkv(), longwave_mask(2, 5, 5, attention_mask=padding))
    assert torch.equal(out[0, :2], torch.zeros(2, 4, 16))
    assert out[0, 2:].abs().min() > 0


def test_a_position_bias_beyond_the_limit_is_refused() -> None:
    bias = torch.empty(1, 1, 1).expand(1, 2**15, 2**14 + 1)[None]
    assert bias.numel() > MAX_BIAS_ELEMENTS
    with pytest.raises(UnsupportedCallError, match="position bias"):
        longwave_attention(Layer(), *qkv(), None, position_bias=bias)


def test_an_integer_mask_that_is_not_ours_is_refused() -> None:
    with pytest.raises(UnsupportedCallError, match="int64"):
        longwave_attention(Layer(), *qkv(), torch.ones(2, 1, 5, 5, dtype=torch.int64))


@pytest.mark.parametrize("layout", ["heads_first", "tokens_first"])
def test_inputs_are_viewed_not_copied(layout: str) -> None:
    states = qkv()[0] if layout == "heads_first" else qkv()[0].transpose(1, 2).contiguous().transpose(1, 2)
    assert tokens_first(states).data_ptr() == states.data_ptr()


def test_a_last_dimension_with_gaps_is_computed_too() -> None:
    inputs = qkv()
    strided = [states.mT.contiguous().mT for states in inputs]
    assert strided[0].stride(-1) != 1
    expected, _ = longwave_attention(Layer(), *inputs, None)
    actual, _ = longwave_attention(Layer(), *strided, None)
    torch.testing.assert_close(actual, expected)


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that any operator made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.untyped_storage().nbytes() // value.element_size())
        return result


@pytest.mark.parametrize("name", ["gemma3", "llama4"])
def test_a_padded_forward_of_4096_tokens_makes_no_square_tensor(name: str) -> None:
    length = 4096
    model = BY_NAME[name].build("longwave")
    mask = torch.ones(1, length, dtype=torch.long)
    mask[0, :5] = 0
    with torch.no_grad(), LargestTensor() as largest:
        model(tokens(1, length), attention_mask=mask, logits_to_keep=1)
    assert largest.elements < length * length / 4
