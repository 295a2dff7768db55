"""On a GPU: the kernels' logits are the modules', and packing needs no second copy of a model."""

from collections import Counter
from typing import Any

import pytest
import torch
from batch_driver import generate
from fused_models import CONFIGS, logits, made
from tiny_models import as_loaded, random_model, tiny_config

from attention_backend import dispatch
from attention_backend.heuristics import gated_linear as heuristics
from attention_backend.kernels import gated_linear as kernel
from attention_backend.layer_chain import MOST_KEYS
from models.batch import SamplingParams
from models.forward import PagedForward
from models.fusing import fuse
from models.runner import ModelRunner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

#: Relative, of all logits: bfloat16 over three layers is about 0.01.
_CLOSE = {torch.bfloat16: 0.03, torch.float16: 0.01, torch.float32: 1e-4}


@pytest.mark.parametrize("dtype", _CLOSE, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_modules(name: str, dtype: torch.dtype) -> None:
    model = made(name, dtype)
    model.to("cuda")  # type: ignore[arg-type]
    forward = PagedForward(model)
    expected, ours = (logits(model, each) for each in (PagedForward(model, fused=False), forward))
    assert (ours - expected).norm() <= _CLOSE[dtype] * expected.norm()
    assert "packed QKV" in forward.fused.fused or "must be multiples of 16" in str(forward.fused)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_by_the_kernel_of_many_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which serves no model as small as these, and no step of theirs, by itself."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("a kernel for Hopper GPUs")
    model = made(name, torch.bfloat16)
    model.to("cuda")  # type: ignore[arg-type]
    expected = logits(model, PagedForward(model, fused=False))
    monkeypatch.setattr(heuristics, "FEWEST_ROWS", 1)
    monkeypatch.setattr(heuristics, "FEWEST_COLUMNS", 1)
    monkeypatch.setattr(heuristics, "LEAST_FILLED", 0.0)
    heuristics.gated_config.cache_clear()
    served, launch = [], kernel.gated_linear

    def noted(*given: Any) -> torch.Tensor:
        served.append(given)
        return launch(*given)

    monkeypatch.setattr(kernel, "gated_linear", noted)
    forward = PagedForward(model)
    try:
        ours = logits(model, forward)
    finally:
        heuristics.gated_config.cache_clear()
    assert (ours - expected).norm() <= _CLOSE[torch.bfloat16] * expected.norm()
    assert bool(served) == ("gates of many rows" in forward.fused.fused)


def test_answers_that_outgrow_the_attention_of_a_chain() -> None:
    """Recorded or not, the same tokens before and after the keys are too many for it."""
    config = tiny_config(max_position_embeddings=8192, head_dim=32, num_attention_heads=4, num_key_value_heads=2)
    loaded = as_loaded(random_model(config).to("cuda:0", torch.bfloat16))  # type: ignore[arg-type]
    prompts = [
        torch.randint(3, 120, (MOST_KEYS - 5 - i,), generator=torch.Generator().manual_seed(i)).tolist()
        for i in range(3)
    ]
    sampling = [SamplingParams(temperature=0.0, ignore_eos=True)] * 3
    for count in (1, 3):
        answers = []
        for eager in (True, False):
            made_runner = ModelRunner(
                loaded, block_size=16, max_num_seqs=4, max_num_batched_tokens=256, max_model_len=8192, num_blocks=1000,
                enforce_eager=eager,
            )  # fmt: skip
            made_runner.warm_up()
            before = Counter(dispatch.calls())
            answers.append(generate(made_runner, prompts[:count], 12, sampling=sampling[:count], budget=256))
            served = Counter(dispatch.calls()) - before
            assert served["layer_chain_sm90"] >= 4 * (config.num_hidden_layers - 1)
            assert served["flash_decode"] >= 4 * config.num_hidden_layers
        assert [a.tokens for a in answers[0]] == [a.tokens for a in answers[1]]


def test_packing_needs_no_second_copy_of_the_weights() -> None:
    config = tiny_config(hidden_size=2048, intermediate_size=8192, num_hidden_layers=12, vocab_size=1000)
    model = random_model(config).to(torch.bfloat16)
    model.to("cuda")
    fuse(random_model(tiny_config(hidden_size=256, num_hidden_layers=1)).to("cuda", torch.bfloat16))  # cuBLAS's memory
    torch.cuda.empty_cache()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    fuse(model)
    a_layer = before // config.num_hidden_layers
    assert torch.cuda.memory_allocated() <= before + 2**20
    assert torch.cuda.max_memory_allocated() <= before + 2 * a_layer
    assert torch.cuda.max_memory_reserved() <= reserved + 3 * a_layer
