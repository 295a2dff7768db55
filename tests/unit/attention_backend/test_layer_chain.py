"""A layer between two attentions is Hugging Face's formulas, rounded where its modules round; wrong calls raise."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from attention_backend import UnsupportedError
from attention_backend import layer_chain as chains
from attention_backend.heuristics.layer_chain import chain_config
from attention_backend.layer_chain import MOST_ROWS, ChainOptions, ChainWeights, layer_chain, refuses

WIDTH, ATTENDED, GATED, NEXT = 48, 32, 72, 40
OPTIONS = ChainOptions("silu", 1e-5, 1e-6)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))) / shape[-1] ** 0.5


def made(dtype: torch.dtype = torch.float32, *, bias: bool = False) -> ChainWeights:
    weights = (randn(WIDTH, ATTENDED), randn(WIDTH), randn(2 * GATED, WIDTH), randn(WIDTH, GATED), randn(WIDTH, seed=1))
    last = (randn(NEXT, WIDTH), randn(NEXT) if bias else None)
    return ChainWeights(*(x if x is None else x.to(dtype) for x in (*weights, *last)))  # type: ignore[arg-type]


def norm(weight: Tensor, eps: float) -> LlamaRMSNorm:
    module = LlamaRMSNorm(WIDTH, eps).requires_grad_(False)
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_the_modules_one_after_another(dtype: torch.dtype, bias: bool) -> None:
    weights = made(dtype, bias=bias)
    attended, residual = randn(3, ATTENDED).to(dtype), randn(3, WIDTH).to(dtype)
    total = residual + attended @ weights.out.T
    gate, up = (norm(weights.norm_mlp, 1e-5)(total) @ weights.gate_up.T).chunk(2, dim=1)
    total = total + (nn.functional.silu(gate) * up) @ weights.down.T
    expected = nn.functional.linear(norm(weights.norm_next, 1e-6)(total), weights.next, weights.next_bias)
    ours = layer_chain(attended, residual, weights, OPTIONS)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(ours[0], total, **tolerance)
    torch.testing.assert_close(ours[1], expected, **tolerance)


def test_torch_knows_its_results_without_running_it() -> None:
    weights = made(bias=True)
    call = (randn(2, ATTENDED), randn(2, WIDTH), weights.out, weights.norm_mlp, weights.gate_up, weights.down,
            weights.norm_next, weights.next, weights.next_bias, "silu", 1e-5, 1e-5, False)  # fmt: skip
    torch.library.opcheck(chains.layer_chain_op.overload, call)


@pytest.mark.parametrize("name", ["out", "norm_mlp", "gate_up", "down", "norm_next", "next", "next_bias"])
def test_a_weight_that_does_not_fit_is_named(name: str) -> None:
    weights = made(bias=True)
    for wrong in (getattr(weights, name)[:-1], getattr(weights, name).double()):
        with pytest.raises(ValueError, match="must be torch"):
            layer_chain(randn(2, ATTENDED), randn(2, WIDTH), replace(weights, **{name: wrong}), OPTIONS)


def test_more_rows_than_it_takes_and_unknown_activations_are_refused() -> None:
    with pytest.raises(ValueError, match=f"1 to {MOST_ROWS} rows"):
        layer_chain(randn(MOST_ROWS + 1, ATTENDED), randn(MOST_ROWS + 1, WIDTH), made(), OPTIONS)
    with pytest.raises(ValueError, match="'relu' is not one of"):
        layer_chain(randn(1, ATTENDED), randn(1, WIDTH), made(), replace(OPTIONS, activation="relu"))


def test_it_has_no_gradient() -> None:
    with pytest.raises(UnsupportedError, match="layer_chain has no gradient"):
        layer_chain(randn(1, ATTENDED), randn(1, WIDTH).requires_grad_(), made(), OPTIONS)


def test_a_cpu_has_no_kernel_for_it() -> None:
    reason = refuses(torch.device("cpu"), torch.bfloat16, attended_width=ATTENDED, width=WIDTH, gated_width=GATED)
    assert reason == "it is a kernel for Hopper GPUs"


@pytest.mark.parametrize("rows", range(1, MOST_ROWS + 1))
@pytest.mark.parametrize(("width", "widest"), [(64, 96), (2048, 8192), (4096, 14336), (5120, 13824), (3072, 24576)])
def test_a_block_has_room_for_its_rows_and_a_ring(rows: int, width: int, widest: int) -> None:
    config = chain_config(rows, width, widest)
    if config is None:
        assert rows * widest * 2 > 150_000
        return
    assert config.stages % config.num_warps == 0, "warps could mistake one filling of the ring for the next"
    assert 0 < config.in_flight <= config.stages
    assert config.smem_bytes(rows, width, widest) > rows * widest * 2 + config.stages * config.tile_bytes
    assert config.smem_bytes(rows, width, widest) + config.static_bytes <= 227 * 1024
