"""The layers around attention are Hugging Face's formulas, rounded where its modules round; wrong calls raise."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from attention_backend import UnsupportedError, layers
from attention_backend.kernels import rotary_store as kernel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOKENS, HEADS, KV_HEADS, DIM, PAGE, BLOCKS = 7, 4, 2, 32, 4, 5


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def rotary_inputs(dtype: torch.dtype = torch.float32, rotary_dim: int = DIM) -> dict[str, Any]:
    """Queries, keys and values as views of one projection; two tokens are not stored."""
    packed = randn(TOKENS, (HEADS + 2 * KV_HEADS) * DIM, dtype=dtype)
    q, k, v = packed.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=1)
    angles = torch.outer(torch.arange(TOKENS) * 3.0, 0.5 ** torch.arange(rotary_dim // 2))
    return {
        "q": q.unflatten(1, (-1, DIM)),
        "k": k.unflatten(1, (-1, DIM)),
        "v": v.unflatten(1, (-1, DIM)),
        "k_cache": torch.zeros(BLOCKS, KV_HEADS, PAGE, DIM, dtype=dtype),
        "v_cache": torch.zeros(BLOCKS, KV_HEADS, PAGE, DIM, dtype=dtype),
        "slot_mapping": torch.tensor([5, 19, -1, 0, 11, -7, 8]),
        "cos": angles.cos(),
        "sin": angles.sin(),
    }


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Hugging Face's rotary on the first elements of each head."""
    rotary_dim = 2 * cos.shape[1]
    tables = [torch.cat([table, table], -1)[None].to(x.dtype) for table in (cos, sin)]
    head = x[..., :rotary_dim].transpose(0, 1)[None]
    rotated, _ = apply_rotary_pos_emb(head, head, *tables)
    return torch.cat([rotated[0].transpose(0, 1), x[..., rotary_dim:]], -1)


def stored(cache: Tensor, slots: Tensor) -> Tensor:
    """What lies in the slots that are not negative: `[tokens, heads, dim]`."""
    kept = slots[slots >= 0]
    return cache.transpose(1, 2)[kept // PAGE, kept % PAGE]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("unit_offset", [False, True])
def test_rms_norm_is_bitwise_the_modules(dtype: torch.dtype, unit_offset: bool) -> None:
    module = (Gemma2RMSNorm(48, 1e-5) if unit_offset else LlamaRMSNorm(48, 1e-5)).requires_grad_(False)
    module.weight.copy_(randn(48))
    module.to(dtype)
    x, residual = randn(9, 48, dtype=dtype), randn(9, 48, dtype=dtype, seed=1)
    assert torch.equal(layers.rms_norm(x, module.weight, 1e-5, unit_offset=unit_offset), module(x))
    normed, total = layers.add_rms_norm(x, residual, module.weight, 1e-5, unit_offset=unit_offset)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, module(x + residual))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotary_dim", [DIM, DIM // 2])
def test_queries_are_turned_and_keys_and_values_stored(dtype: torch.dtype, rotary_dim: int) -> None:
    call = rotary_inputs(dtype, rotary_dim)
    out = layers.rotary_store(**call)
    slots, kept = call["slot_mapping"], call["slot_mapping"] >= 0
    assert torch.equal(out, turned(call["q"], call["cos"], call["sin"]))
    assert torch.equal(stored(call["k_cache"], slots), turned(call["k"], call["cos"], call["sin"])[kept])
    assert torch.equal(stored(call["v_cache"], slots), call["v"][kept])
    assert int((call["k_cache"] != 0).any(-1).sum()) == int(kept.sum()) * KV_HEADS, "another slot was written"


@pytest.mark.parametrize("unit_offset", [False, True])
def test_heads_are_normalised_before_they_are_turned(unit_offset: bool) -> None:
    call = rotary_inputs()
    q_norm, k_norm = randn(DIM), randn(DIM, seed=1)
    out = layers.rotary_store(**call, q_norm=q_norm, k_norm=k_norm, eps=1e-6, unit_offset=unit_offset)
    module = Gemma2RMSNorm(DIM, 1e-6) if unit_offset else LlamaRMSNorm(DIM, 1e-6)
    module.requires_grad_(False).weight.copy_(q_norm)
    torch.testing.assert_close(out, turned(module(call["q"]), call["cos"], call["sin"]))
    module.weight.copy_(k_norm)
    expected = turned(module(call["k"]), call["cos"], call["sin"])[call["slot_mapping"] >= 0]
    torch.testing.assert_close(stored(call["k_cache"], call["slot_mapping"]), expected)


def test_float8_pages_hold_values_over_their_heads_scale() -> None:
    call = rotary_inputs()
    scales: dict[str, Any] = {"k_scale": torch.tensor([0.5, 0.25]), "v_scale": torch.tensor([0.02, 1.0])}
    for name in ("k_cache", "v_cache"):
        call[name] = call[name].to(torch.float8_e4m3fn)
    layers.rotary_store(**call, **scales)
    keys = stored(call["k_cache"].float(), call["slot_mapping"]) * scales["k_scale"][:, None]
    expected = turned(call["k"], call["cos"], call["sin"])[call["slot_mapping"] >= 0]
    torch.testing.assert_close(keys, expected, rtol=2**-4, atol=0.01)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_activations_are_torchs(dtype: torch.dtype) -> None:
    gate, up = randn(5, 24, dtype=dtype), randn(5, 24, dtype=dtype, seed=1)
    assert torch.equal(layers.gated_activation(gate, up, "silu"), F.silu(gate) * up)
    assert torch.equal(layers.gated_activation(gate, up, "gelu"), F.gelu(gate) * up)
    assert torch.equal(layers.gated_activation(gate, up, "gelu_tanh"), F.gelu(gate, approximate="tanh") * up)


FLOAT8 = {name: torch.zeros(BLOCKS, KV_HEADS, PAGE, DIM, dtype=torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
SCALES = {name: torch.ones(KV_HEADS) for name in ("k_scale", "v_scale")}


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"k": randn(TOKENS, KV_HEADS, DIM + 8)}, ValueError, "q, k and v must be"),
        ({"v": randn(TOKENS - 1, KV_HEADS, DIM)}, ValueError, "k and v alike"),
        ({"k_cache": torch.zeros(BLOCKS, KV_HEADS + 1, PAGE, DIM)}, ValueError, r"must be \[num_blocks, 2, block_size"),
        ({"cos": torch.zeros(TOKENS, DIM)}, ValueError, "with rotary_dim <= 32"),
        ({"sin": torch.zeros(TOKENS, DIM // 2).half()}, TypeError, "cos and sin must be float32"),
        ({"slot_mapping": torch.zeros(TOKENS, dtype=torch.int32)}, ValueError, "slot_mapping must be int64"),
        (
            {"k": randn(TOKENS, KV_HEADS, DIM).half()},
            TypeError,
            "must have one dtype, got torch.float32, torch.float16",
        ),
        ({"v": randn(TOKENS, KV_HEADS, DIM).double()}, TypeError, "must have one dtype"),
        ({"k_cache": torch.zeros(BLOCKS, KV_HEADS, PAGE, DIM).half()}, TypeError, "q is torch.float32, the caches are"),
        ({"v": randn(TOKENS, KV_HEADS, DIM).to("meta")}, ValueError, "must be on one device, got cpu, cpu, meta"),
        ({"cos": torch.zeros(TOKENS, 16, device="meta")}, ValueError, "must be on one device"),
        ({"v_cache": torch.zeros(BLOCKS, KV_HEADS, PAGE, DIM, device="meta")}, ValueError, "v_cache is on meta"),
        ({"k_scale": torch.ones(KV_HEADS)}, ValueError, "k_scale goes with torch.float8_e4m3fn caches"),
        (FLOAT8, ValueError, "k_scale goes with"),
        ({**FLOAT8, **SCALES, "v_scale": torch.ones(3)}, ValueError, r"v_scale must have shape \[2\]"),
        ({**FLOAT8, **SCALES, "k_scale": torch.ones(2).half()}, TypeError, "k_scale must be torch.float32"),
        ({"q_norm": torch.ones(DIM), "k_norm": torch.ones(DIM, device="meta")}, ValueError, "k_norm is on meta"),
        ({"q_norm": torch.ones(DIM)}, ValueError, "q_norm and k_norm go together"),
        ({"q_norm": torch.ones(DIM), "k_norm": torch.ones(DIM).half()}, ValueError, "k_norm must be torch.float32"),
    ],
)
def test_rotary_calls_that_do_not_fit_raise(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        layers.rotary_store(**(rotary_inputs() | changes))


@pytest.mark.parametrize("name", ["cos", "sin", "q_norm"])
def test_the_kernel_refuses_what_it_cannot_read_16_bytes_at_a_time(name: str) -> None:
    call = rotary_inputs(torch.bfloat16) | {n: torch.ones(DIM, dtype=torch.bfloat16) for n in ("q_norm", "k_norm")}
    whole = torch.zeros(*call[name].shape[:-1], call[name].shape[-1] + 8, dtype=call[name].dtype)
    call[name] = whole[..., 1 : call[name].shape[-1] + 1]
    with pytest.raises(UnsupportedError, match=f"{name} of .*multiples of"):
        kernel.rotary_store(**call, eps=1e-6, unit_offset=False, k_scale=None, v_scale=None)


def test_rows_that_do_not_fit_raise() -> None:
    x, weight = randn(3, 8), randn(8)
    with pytest.raises(ValueError, match=r"x must be \[rows, width\]"):
        layers.rms_norm(x, randn(9), 1e-6)
    with pytest.raises(TypeError, match=r"its weight torch\.float16"):
        layers.rms_norm(x, weight.half(), 1e-6)
    with pytest.raises(ValueError, match=r"residual \(2, 8\)"):
        layers.add_rms_norm(x, x[:2], weight, 1e-6)
    with pytest.raises(ValueError, match="activation 'relu' is not one of silu, gelu_tanh, gelu"):
        layers.gated_activation(x, x, "relu")
    with pytest.raises(ValueError, match="weight is on meta"):
        layers.rms_norm(x, weight.to("meta"), 1e-6)
    with pytest.raises(ValueError, match="residual is on meta"):
        layers.add_rms_norm(x, x.to("meta"), weight, 1e-6)
    with pytest.raises(ValueError, match="up is on meta"):
        layers.gated_activation(x, x.to("meta"), "silu")
    with pytest.raises(ValueError, match="of one dtype"):
        layers.gated_activation(x, x[:2], "silu")


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"width": 40000}, "rows of 40000 elements: RMSNorm takes multiples of 8 up to 32768"),
        ({"gated_width": 100}, "a gated activation of 100 elements"),
        ({"head_dim": 72}, "head_dim 72 with rotary_dim 64"),
        ({"rotary_dim": 24}, "rotary_dim 24"),
        ({}, None),
    ],
)
def test_sizes_without_kernels_are_named(sizes: dict[str, int], words: str | None) -> None:
    reason = layers.refuses(**({"width": 4096, "gated_width": 14336, "head_dim": 128, "rotary_dim": 64} | sizes))
    assert reason is None if words is None else words in (reason or "")


def test_compiled_layers_are_one_graph_with_the_right_shapes() -> None:
    call = rotary_inputs()

    def layer(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *others: Tensor) -> Tensor:
        x = layers.rotary_store(q, k, v, k_cache, v_cache, *others).flatten(1)
        normed, total = layers.add_rms_norm(x, x, torch.ones(x.shape[1]), 1e-6)
        return layers.rms_norm(layers.gated_activation(normed, total, "silu"), torch.ones(x.shape[1]), 1e-6)

    again = {name: tensor.clone() for name, tensor in call.items()}
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*call.values()), layer(*again.values()))
    assert torch.equal(call["k_cache"], again["k_cache"])


def test_layers_have_no_gradients() -> None:
    x, weight = randn(TOKENS, 48), randn(48).requires_grad_()
    call = rotary_inputs()
    with pytest.raises(UnsupportedError, match=r"^rms_norm has no gradient"):
        layers.rms_norm(x, weight, 1e-5)
    with pytest.raises(UnsupportedError, match="add_rms_norm has no gradient"):
        layers.add_rms_norm(x, x, weight, 1e-5)
    with pytest.raises(UnsupportedError, match="gated_activation has no gradient"):
        layers.gated_activation(x.clone().requires_grad_(), x, "silu")
    with pytest.raises(UnsupportedError, match="rotary_store has no gradient"):
        layers.rotary_store(**{**call, "v": call["v"].clone().requires_grad_()})
    scales = {**SCALES, "k_scale": torch.ones(KV_HEADS, requires_grad=True)}
    with pytest.raises(UnsupportedError, match="rotary_store has no gradient"):
        layers.rotary_store(**{**call, **FLOAT8}, **scales)
    assert not call["v_cache"].any()
    with torch.no_grad():
        assert torch.equal(layers.rms_norm(x, weight, 1e-5), layers.rms_norm(x, weight.detach(), 1e-5))
