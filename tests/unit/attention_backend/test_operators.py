"""Operators step out of torch's way only where nobody would notice."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attention_backend import layers
from attention_backend.operators import unseen


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def test_they_do_in_inference_mode_alone() -> None:
    assert not unseen()
    with torch.no_grad():
        assert not unseen()
    with torch.inference_mode():
        assert unseen()
        with Names():
            assert not unseen()
        with torch.device("cpu"):  # a mode over torch's functions
            assert not unseen()


def test_who_looks_at_operators_sees_them() -> None:
    x, weight = torch.randn(2, 16), torch.ones(16)
    with torch.inference_mode(), Names() as names:
        layers.rms_norm(x, weight, 1e-5)
    assert names.seen[0] == "longwave::rms_norm"


def test_both_ways_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(2, 16), torch.ones(16)
    expected = layers.rms_norm(x, weight, 1e-5)
    monkeypatch.setattr(layers.rms_norm_op, "overload", None)
    with torch.inference_mode():
        assert torch.equal(layers.rms_norm(x, weight, 1e-5), expected)
    with pytest.raises(TypeError, match="not callable"):
        layers.rms_norm(x, weight, 1e-5)


def test_tensors_without_values_stay_operators() -> None:
    x, weight = torch.randn(2, 16, device="meta"), torch.ones(16, device="meta")
    with torch.inference_mode():
        assert layers.rms_norm(x, weight, 1e-5).shape == x.shape
