"""Steps of few rows go from attention to attention in one call: the same answers, and only where it is the same layer.

A CPU has no kernel for it and says so; told that it has, it computes the formula in plain torch.
"""

from typing import Any

import pytest
import torch
from fused_models import CONFIGS, logits, made
from torch import Tensor, nn

import models.fusing.layer
from attention_backend import layer_chain
from attention_backend.layer_chain import OwnAttention
from models.forward import PagedForward
from models.fusing import foretell, fuse

SANDWICH = ("gemma2", "gemma3")
FEW = 2  # rows of the smallest steps
WITH_ATTENTION = 100
BOTH = FEW + WITH_ATTENTION


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every call, on a CPU that serves them: negative where the call also stored keys and values; 100 more
    where it began with the attention."""
    rows: list[int] = []

    def count(name: str, sign: int) -> None:
        run = getattr(layer_chain, name)

        def counted(attended: Tensor, *others: Any, own: OwnAttention | None) -> tuple[Tensor, Tensor]:
            rows.append(sign * (attended.shape[0] + (0 if own is None else WITH_ATTENTION)))
            result: tuple[Tensor, Tensor] = run(attended, *others, own=own)
            return result

        monkeypatch.setattr(layer_chain, name, counted)

    count("layer_chain", 1)
    count("layer_chain_to_pages", -1)
    monkeypatch.setattr(layer_chain, "refuses", lambda *_, **__: None)
    return rows


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in SANDWICH])
@pytest.mark.parametrize("sampled", [False, True], ids=["every row", "sampled rows"])
def test_logits_are_those_of_the_modules(name: str, sampled: bool, calls: list[int]) -> None:
    model = made(name)
    expected = logits(model, PagedForward(model, fused=False), sampled=sampled)
    torch.testing.assert_close(logits(model, PagedForward(model), sampled=sampled), expected, rtol=1e-5, atol=1e-5)
    # Heads with norms, and layers without positions (SmolLM3's second), take the products themselves. Windows, and
    # those layers, compute their attention themselves. The last layer has two rows where only those are sampled.
    following = {"qwen3": [BOTH, BOTH], "smollm3": [BOTH, -FEW], "mistral": [-FEW, -FEW]}.get(name, [-BOTH, -BOTH])
    last = FEW if name == "mistral" else BOTH
    expected_calls = [last, last, *following, last] if sampled else [*following, last]
    assert calls == ([] if name == "llama with biases" else expected_calls)


def test_the_attention_of_many_keys_is_computed_by_itself(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("llama")
    expected = logits(model, PagedForward(model, fused=False))
    monkeypatch.setattr(models.fusing.layer, "MOST_KEYS", 37)  # the decodes have 9 and 40
    torch.testing.assert_close(logits(model, PagedForward(model)), expected, rtol=1e-5, atol=1e-5)
    assert calls == [-FEW, -FEW, FEW]


@pytest.mark.parametrize("name", SANDWICH)
def test_other_layers_are_left_alone(name: str, calls: list[int]) -> None:
    model = made(name)
    decoder = fuse(model)
    logits(model, PagedForward(model))
    assert calls == []
    assert {chain.refuses(torch.device("cpu")) for chain in decoder.chains} == {
        "a block's result is normalised before it is added"
    }


@pytest.mark.parametrize(
    ("path", "layers"),
    [
        ("model.layers.1.self_attn.o_proj", [0, 2]),
        ("model.layers.1.self_attn.v_proj", [1, 2]),
        ("model.layers.1.mlp.up_proj", [0, 2]),
        ("model.layers.1.mlp.down_proj", [0, 2]),
        ("model.layers.1.mlp.act_fn", [0, 2]),
        ("model.layers.1.input_layernorm", [1, 2]),
        ("model.layers.1.post_attention_layernorm", [0, 2]),
        ("model.norm", [0, 1]),
        ("lm_head", [0, 1]),
    ],
)
def test_what_was_hooked_since_is_called_as_the_module_it_is(path: str, layers: list[int], calls: list[int]) -> None:
    def doubled(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        return 2 * output

    model = made("qwen3")
    forward = PagedForward(model)
    decoder = fuse(model)
    hook = model.get_submodule(path).register_forward_hook(doubled)
    expected = logits(model, PagedForward(model, fused=False))
    torch.testing.assert_close(logits(model, forward), expected, rtol=1e-5, atol=1e-5)
    assert len(calls) == len(layers)
    reasons = [chain.refuses(torch.device("cpu")) for chain in decoder.chains]
    assert [i for i, reason in enumerate(reasons) if reason is None] == layers
    hook.remove()
    assert not any(chain.refuses(torch.device("cpu")) for chain in decoder.chains)


def test_weights_that_moved_are_seen(calls: list[int]) -> None:
    model = made("llama")
    forward = PagedForward(model)
    mlp = model.model.layers[0].mlp
    mlp.gate_proj.weight = nn.Parameter(torch.randn_like(mlp.gate_proj.weight), requires_grad=False)
    expected = logits(model, PagedForward(model, fused=False))
    torch.testing.assert_close(logits(model, forward), expected, rtol=1e-5, atol=1e-5)
    assert calls == [-BOTH, BOTH]


@pytest.mark.parametrize(("name", "ends"), [("llama", [True, True, False]), ("qwen3", [False] * 3)])
def test_kernels_are_prepared_as_steps_will_want_them(name: str, ends: list[bool], calls: list[int]) -> None:
    model = made(name)
    steps = [chain.step(torch.device("cpu")) for chain in fuse(model).chains]
    logits(model, PagedForward(model))
    assert [step.to_pages for step in steps if step is not None] == ends == [rows < 0 for rows in calls]


@pytest.mark.parametrize(("name", "some"), [("llama", True), ("qwen3", True), ("mistral", False), ("gemma2", False)])
def test_whether_some_chain_begins_with_attention_is_known_before(name: str, some: bool, calls: list[int]) -> None:
    assert PagedForward(made(name)).attends_in_chains is some
    assert calls == []


def test_nothing_is_prepared_where_chains_are_refused() -> None:
    model = made("llama")
    assert [chain.step(torch.device("cpu")) for chain in fuse(model).chains] == [None] * 3
    assert PagedForward(model).kernels(fp8_kv=False) == []


def test_a_report_for_a_gpu_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    part, cuda = "layers' chain of few rows", torch.device("cuda")
    monkeypatch.setattr(layer_chain, "refuses", lambda *_, **__: "it is a kernel for sm_90a, not for sm_80")
    assert foretell(made("llama"), cuda).unfused[part] == "it is a kernel for sm_90a, not for sm_80"
    assert foretell(made("gemma2"), cuda).unfused[part] == "a block's result is normalised before it is added"
    assert foretell(made("llama with biases"), cuda).unfused[part] == "the attention's output or the MLP has a bias"
    monkeypatch.setattr(layer_chain, "refuses", lambda *_, **__: None)
    assert part in foretell(made("llama"), cuda).fused
    assert part not in str(foretell(made("llama"), torch.device("cpu")))
