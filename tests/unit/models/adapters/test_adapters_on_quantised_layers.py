"""Adapters that were trained on plain weights, on the same model quantised."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_folders import quantized
from random_adapters import PackedBatch, alone, save_adapter
from safetensors.torch import load_file
from test_quantization import KEPT
from torch import Tensor, nn

from models.adapters import find_linears
from models.batch import NO_ADAPTER
from models.loader import load, load_for_training
from models.registry import ModelSource

PROMPTS = [list(range(3, 23)), [5, 6, 7]]
SCALING = 16 / 8  # lora_alpha / r


def _add_by_hooks(layer: nn.Module, a: Tensor, b: Tensor) -> None:
    """What an adapter means, in other words than ours. PEFT's own answer is no reference here: on a CPU its layers over
    bitsandbytes' fp4 are off by a third, adapter or not (PEFT 0.21.2, bitsandbytes 0.50.2)."""
    layer.register_forward_hook(lambda _layer, inputs, y: y + SCALING * (inputs[0] @ a.T) @ b.T)


@pytest.mark.parametrize(("config", "name", "kind"), KEPT)
def test_adapters_of_the_plain_model_are_served_on_quantised_layers(
    tmp_path: Path, config: Callable[[str], Any], name: str, kind: str
) -> None:
    source, adapter = quantized(tmp_path, config(name), torch.float32), tmp_path / "adapter"
    save_adapter(load_for_training(ModelSource(name="plain", folder=tmp_path / "plain"), dtype="float32"), adapter, 3)
    model = load(source).model
    layers = find_linears(model)
    assert len(layers) == 3 * 7
    assert {type(layer.module).__name__ for layer in layers.values()} == {kind}
    batch = PackedBatch(model)
    before = batch.logits(PROMPTS, [NO_ADAPTER, NO_ADAPTER])
    batch.slots.read(0, str(adapter))
    batch.slots.place(0, 1)
    adapted, unadapted = batch.logits(PROMPTS, [1, NO_ADAPTER])
    batch.slots.remove()
    factors = load_file(adapter / "adapter_model.safetensors")
    for path, layer in layers.items():
        _add_by_hooks(layer.module, *(factors[f"base_model.model.{path}.lora_{side}.weight"] for side in "AB"))
    model.set_attn_implementation("eager")
    expected = alone(model, PROMPTS[0])
    # Layers that round what they are given, some by the largest of the whole batch: a small difference may be a step.
    assert (adapted - expected).norm() < 0.05 * expected.norm()
    assert (adapted - before[0]).norm() > expected.norm()
    assert (unadapted - before[1]).norm() < 0.05 * before[1].norm()
