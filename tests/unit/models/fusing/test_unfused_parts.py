"""What is not exactly a known part stays with its module, whenever it changed, and is told."""

from typing import Any

import pytest
import torch
from fused_models import logits, made
from tiny_models import random_model
from torch import Tensor, nn
from transformers import GPT2Config, GraniteConfig, PreTrainedModel

from models.attention_sites import find_attention_sites
from models.batch import ScheduledSeq, StepBatch
from models.forward import PagedForward
from models.fusing import NotFusedError, foretell, fuse
from models.inputs import StepInputs
from models.kv_pool import allocate
from models.packed_linear import pack_linears

CUDA = torch.device("cuda")
UNKNOWN = (
    GPT2Config(vocab_size=120, n_embd=64, n_layer=2, n_head=4, n_positions=512, bos_token_id=1, eos_token_id=2),
    GraniteConfig(vocab_size=120, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4),
)


def same(model: PreTrainedModel, forward: PagedForward) -> None:
    expected = logits(model, PagedForward(model, fused=False))
    torch.testing.assert_close(logits(model, forward), expected, rtol=1e-5, atol=1e-5)


def doubled(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    return 2 * output


def test_a_layer_that_is_no_linear_one_is_called_as_it_is() -> None:
    model = made("llama")
    attention = model.model.layers[0].self_attn
    attention.o_proj = nn.Sequential(attention.o_proj)
    forward = PagedForward(model)
    same(model, forward)
    assert "packed QKV" in forward.fused.fused


def test_gates_that_are_no_linear_layers_are_told() -> None:
    """And nothing is asked of them that only a linear layer has."""
    model = made("llama")
    for layer in model.model.layers:
        layer.mlp.gate_proj = nn.Sequential(layer.mlp.gate_proj)
    assert foretell(model, CUDA).unfused["packed gate/up"] == "they are Sequential"
    assert "gates of many rows" not in foretell(model, CUDA).fused


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_that_samples_no_row_asks_no_layer_for_no_rows(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU bitsandbytes' 4-bit layers end the process then, and torchao's int8 layers raise TypeError."""
    model, seen = made("qwen3"), []
    whole = nn.Linear.forward

    def watched(layer: nn.Linear, x: Tensor) -> Tensor:
        seen.append(x.numel())
        return whole(layer, x)

    monkeypatch.setattr(nn.Linear, "forward", watched)
    seq = ScheduledSeq(0, [5, 6, 7], 0, [1], sample=False)
    step = StepInputs(
        max_num_seqs=1, max_num_batched_tokens=8, max_blocks_per_seq=1, block_size=16, device=model.device
    ).build(StepBatch((seq,)))
    caches = allocate(find_attention_sites(model), 2, 16, model.dtype, model.device)
    with torch.inference_mode():
        nothing = PagedForward(model, fused=fused).sampled_rows(step, caches)
    assert nothing.shape == (0, model.config.vocab_size)
    assert 0 not in seen
    assert all(layer.k[1, :, :3].abs().sum(-1).all() for layer in caches)


@pytest.mark.parametrize(
    "path",
    [
        "model.layers.1.self_attn.v_proj",
        "model.layers.1.self_attn.o_proj",
        "model.layers.1.self_attn.q_norm",
        "model.layers.1.mlp.up_proj",
        "model.layers.1.mlp.down_proj",
        "model.layers.1.mlp.act_fn",
        "model.layers.1.input_layernorm",
        "model.layers.2.post_attention_layernorm",
        "model.norm",
        "model.embed_tokens",
        "lm_head",
        "model.layers.1",
        "model.layers.1.mlp",
    ],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_are_honoured_wherever_and_whenever_they_come(path: str, when: str) -> None:
    model = made("qwen3")
    plain = logits(model, PagedForward(model))
    module = model.get_submodule(path)
    hook = module.register_forward_hook(doubled) if when == "before" else None
    forward = PagedForward(model)
    hook = hook or module.register_forward_hook(doubled)
    assert not torch.allclose(logits(model, forward), plain, rtol=1e-3, atol=1e-3)
    same(model, forward)
    hook.remove()
    torch.testing.assert_close(logits(model, forward), plain, rtol=1e-5, atol=1e-5)


def test_a_replaced_forward_is_called_and_told() -> None:
    model = made("llama")
    forward = PagedForward(model)
    assert forward.fused.unfused == {}
    layer = model.model.layers[0].self_attn.v_proj
    base = layer.forward
    layer.__dict__["forward"] = lambda x: base(x) + 1.0  # as adapters do
    same(model, forward)
    assert forward.fused.unfused == {"packed QKV": "Linear with hooks or an adapter (1 of 3)"}
    assert "packed QKV not: Linear with hooks or an adapter (1 of 3)" in str(forward.fused)


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_linear_layers_laid_out_for_a_cpu_lie_together(family: str) -> None:
    model = made(family)
    expected = logits(model, PagedForward(model, fused=False))
    assert pack_linears(model) > 0
    forward = PagedForward(model)
    torch.testing.assert_close(logits(model, forward), expected, rtol=1e-4, atol=1e-4)
    assert forward.fused.unfused == {}
    again = PagedForward(model, fused=False)  # each part by itself
    torch.testing.assert_close(logits(model, again), expected, rtol=1e-4, atol=1e-4)


def test_a_layer_that_lies_with_others_is_left_to_its_own_forward() -> None:
    model = made("llama")
    assert pack_linears(model) > 0
    forward = PagedForward(model)
    layer = model.model.layers[0].self_attn.v_proj
    base = layer.forward
    layer.__dict__["forward"] = lambda x: base(x) + 1.0  # as adapters do
    torch.testing.assert_close(
        logits(model, forward), logits(model, PagedForward(model, fused=False)), rtol=1e-4, atol=1e-4
    )
    assert forward.fused.unfused == {"packed QKV": "PackedLinear with hooks or an adapter (1 of 3)"}


def test_a_subclassed_norm_stays_a_module() -> None:
    model = made("llama")

    class Louder(type(model.model.norm)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> Tensor:
            return 3 * super().forward(hidden_states)

    for layer in model.model.layers:
        layer.post_attention_layernorm.__class__ = Louder
    forward = PagedForward(model)
    same(model, forward)
    assert forward.fused.unfused == {
        "residual + RMSNorm": "Louder is not the family's, is hooked, or of another dtype (3 of 7)"
    }


def test_norms_kept_in_float32_stay_modules() -> None:
    model = made("gemma3", torch.bfloat16)
    for layer in model.model.layers:
        layer.self_attn.q_norm.float()
        layer.self_attn.k_norm.float()
    forward = PagedForward(model)
    expected = logits(model, PagedForward(model, fused=False))
    torch.testing.assert_close(logits(model, forward), expected, rtol=2e-3, atol=2e-3)
    reason = "Gemma3RMSNorm is not the family's, is hooked, or of another dtype"
    assert forward.fused.unfused == {"heads' RMSNorm": reason}


def test_an_activation_without_a_kernel_stays_a_module() -> None:
    model = made("llama")
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Tanh()
    forward = PagedForward(model)
    same(model, forward)
    assert forward.fused.unfused == {"gated activation": "its activation is not a fused one"}


@pytest.mark.parametrize("part", ["self_attn", "mlp"])
def test_a_subclassed_block_leaves_the_whole_model_to_its_modules(part: str) -> None:
    model = made("llama")
    block = getattr(model.model.layers[1], part)
    block.__class__ = type("Changed", (type(block),), {})
    forward = PagedForward(model)
    same(model, forward)
    assert "stands where transformers.models.llama" in forward.fused.unfused["model"]


@pytest.mark.parametrize("config", UNKNOWN, ids=["gpt2", "granite"])
def test_an_unknown_family_is_served_by_its_modules_and_told(config: Any) -> None:
    model = random_model(config)
    forward = PagedForward(model)
    assert forward.fused.fused == ()
    assert f"{type(model).__name__} is not one of the fused families (LlamaForCausalLM," in str(forward.fused)
    assert logits(model, forward).isfinite().all()


def test_sizes_without_kernels_are_told_before_a_gpu_sees_them() -> None:
    model = made("phi3")  # heads of 16, of which a kernel's lane would take all
    fuse(model, pack=False, device=CUDA)
    odd = made("phi3 turned in part")
    with pytest.raises(NotFusedError, match="head_dim 16 with rotary_dim 8: they must be multiples of 16"):
        fuse(odd, pack=False, device=CUDA)
    assert "head_dim 16 with rotary_dim 8" in foretell(odd, CUDA).unfused["model"]


def test_what_will_be_fused_is_told_of_models_without_weights() -> None:
    model: Any = made("llama")
    model.to("meta")
    packed = {"packed QKV", "packed gate/up"}
    assert set(foretell(model, CUDA).fused) >= packed
    assert set(foretell(model, torch.device("cpu")).fused) >= packed
    assert "GPT2LMHeadModel" in str(foretell(random_model(UNKNOWN[0]), CUDA))
