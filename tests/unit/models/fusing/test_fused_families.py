"""Every fused family answers what its own modules answer, in every kind of step."""

from typing import Any

import pytest
import torch
from fused_models import CONFIGS, STEPS, logits, made
from torch import Tensor

import attention_backend
from models.attention_sites import find_attention_sites
from models.batch import ScheduledSeq, StepBatch
from models.forward import PagedForward
from models.fusing import fuse
from models.inputs import StepInputs
from models.kv_pool import allocate
from models.packed_linear import pack_linears


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


@pytest.mark.parametrize("packed", [False, True], ids=["linear", "for a CPU"])
def test_a_step_that_samples_nothing_stores_its_keys_for_the_next(packed: bool) -> None:
    model = made("llama")
    if packed:
        pack_linears(model)
    inputs = StepInputs(
        max_num_seqs=1, max_num_batched_tokens=64, max_blocks_per_seq=4, block_size=16, device=model.device
    )
    prompt = list(range(1, 41))

    @torch.inference_mode()
    def last_row(forward: PagedForward, *, chunk: int) -> Tensor:
        caches = allocate(find_attention_sites(model), 4, 16, model.dtype, model.device)
        rows = []
        for start in range(0, len(prompt), chunk):
            seq = ScheduledSeq(0, prompt[start : start + chunk], start, [3, 1, 2], sample=start + chunk >= len(prompt))
            rows.append(forward.sampled_rows(inputs.build(StepBatch((seq,))), caches))
        assert [len(part) for part in rows] == [0] * (len(rows) - 1) + [1]
        return rows[-1]

    whole = last_row(PagedForward(model, fused=False), chunk=40)
    torch.testing.assert_close(last_row(PagedForward(model), chunk=20), whole, rtol=1e-4, atol=1e-4)


def test_the_last_layers_attention_is_of_the_sampled_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("llama")
    rows: list[int] = []
    attend = attention_backend.paged_attention

    def counted(q: Tensor, *others: Any, **options: Any) -> Tensor:
        rows.append(q.shape[0])
        return attend(q, *others, **options)

    monkeypatch.setattr(attention_backend, "paged_attention", counted)
    expected = logits(model, PagedForward(model))
    assert rows == [row for counts in STEPS for row in [sum(counts)] * 3]
    rows.clear()
    ours = logits(model, PagedForward(model), sampled=True)
    assert rows == [row for counts in STEPS for row in (sum(counts), sum(counts), 2)]
    ends = torch.tensor(STEPS).flatten().cumsum(0) - 1
    torch.testing.assert_close(ours, expected[ends], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fused", [True, False])
def test_somebody_is_called_between_layers(fused: bool) -> None:
    """And nothing else changes: fused layers stay fused."""
    model, calls = made("llama"), []
    sites = find_attention_sites(model)
    forward = PagedForward(model, fused=fused)
    expected = logits(model, forward, sites=sites)
    forward.call_between_layers(lambda: calls.append(None))
    assert torch.equal(logits(model, forward, sites=sites), expected)
    assert len(calls) == len(STEPS) * model.config.num_hidden_layers
    assert ("model" in forward.fused.unfused) != fused
