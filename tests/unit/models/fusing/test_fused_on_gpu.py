"""On a GPU: the kernels' logits are the modules', and packing needs no second copy of a model."""

import pytest
import torch
from fused_models import CONFIGS, logits, made
from tiny_models import random_model, tiny_config

from models.forward import PagedForward
from models.fusing import fuse

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


def test_packing_needs_no_second_copy_of_the_weights() -> None:
    config = tiny_config(hidden_size=2048, intermediate_size=8192, num_hidden_layers=12, vocab_size=1000)
    model = random_model(config).to(torch.bfloat16)
    model.to("cuda")
    torch.cuda.empty_cache()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    fuse(model)
    a_layer = before // config.num_hidden_layers
    assert torch.cuda.memory_allocated() <= before + 2**20
    assert torch.cuda.max_memory_allocated() <= before + 2 * a_layer
    assert torch.cuda.max_memory_reserved() <= reserved + 3 * a_layer
