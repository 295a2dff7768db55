"""`longwave doctor` looks at what the settings ask for: their device, and the pages of their KV cache."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from attention_backend import dispatch
from server.doctor import diagnose
from server.engine.config import EngineConfig


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model's folder without weights."""
    folder = tmp_path_factory.mktemp("model")
    LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
    ).save_pretrained(folder)  # fmt: skip
    return str(folder)


def test_a_gpu_that_is_not_to_be_used_is_not_asked(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.doctor._gpus", list)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)

    said = diagnose(EngineConfig(model=model, device="cpu"), {})

    (layers,) = said.layers
    assert layers.prefill.startswith("cpu_reference")
    assert layers.decode.startswith("cpu_reference")


def test_a_gpu_that_is_missing_is_a_problem(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    said = diagnose(EngineConfig(model=model, device="cuda"), {})

    assert said.layers == []
    assert "device is 'cuda', but torch finds no usable GPU" in said.problems


@pytest.mark.parametrize(("asked", "dtype"), [("auto", torch.float32), ("fp8", torch.float8_e4m3fn)])
def test_kernels_are_those_of_the_pages_that_are_asked_for(
    model: str, monkeypatch: pytest.MonkeyPatch, asked: str, dtype: torch.dtype
) -> None:
    select, pages = dispatch.select, set()
    monkeypatch.setattr(dispatch, "select", lambda args: pages.add((args.k.dtype, args.v.dtype)) or select(args))

    (layers,) = diagnose(EngineConfig(model=model, device="cpu", kv_cache_dtype=asked), {}).layers

    assert pages == {(dtype, dtype)}
    assert layers.decode.startswith("cpu_reference")


def test_pages_that_the_model_cannot_have_are_a_problem(model: str) -> None:
    said = diagnose(EngineConfig(model=model, device="cpu", dtype="float32", kv_cache_dtype="float16"), {})
    assert said.layers == []
    assert any("kv_cache_dtype is 'float16'" in problem for problem in said.problems)


def test_a_weight_file_that_was_cut_is_a_problem(model: str, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(9), "b": torch.zeros(9)}, path)
    path.write_bytes(path.read_bytes()[:-1])

    said = diagnose(EngineConfig(model=str(tmp_path), device="cpu"), {})

    assert said.layers
    assert any(f"{path} ends before b" in problem for problem in said.problems)
