"""Headers and bytes of weights: what is read by ourselves, what is left alone, and what goes wrong."""

import json
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from models import weight_reading
from models.stored_weights import StoredTensor, readable, stored_tensors, together
from models.weight_reading import WeightReading

CPU = torch.device("cpu")


def tensors(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (50, 8), "layers.0.self_attn.v_proj.weight": (4, 8), "empty": (0, 8), "scalar": (),
        "layers.0.self_attn.q_proj.weight": (12, 8), "layers.0.self_attn.k_proj.weight": (4, 8),
        "layers.0.self_attn.o_proj.weight": (8, 12), "layers.0.mlp.up_proj.weight": (16, 8),
        "layers.0.mlp.gate_proj.weight": (16, 8), "norm.weight": (8,),
    }  # fmt: skip
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def write(folder: Path, weights: dict[str, torch.Tensor], *, files: int = 1, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    names = sorted(weights)
    if files == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    index = {name: f"model-{at % files}.safetensors" for at, name in enumerate(names)}
    for file in set(index.values()):
        save_file({name: weights[name] for name in names if index[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_byte_arrives_in_pieces_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(weight_reading, "CHUNK", 50)
    weights = tensors(dtype)
    stored = readable(write(tmp_path, weights, files=files))
    assert stored is not None
    interval = sys.getswitchinterval()
    found = WeightReading(stored, CPU).finish()
    assert sys.getswitchinterval() == interval
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, dtype)
        assert torch.equal(found[name], tensor)


def test_linears_of_one_input_lie_below_each_other(tmp_path: Path) -> None:
    stored = stored_tensors(write(tmp_path, tensors(), files=3))
    groups = [[member.name.removesuffix(".weight") for member in group] for group in together(stored)]
    attention = [f"layers.0.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")]
    assert attention in groups
    assert ["layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"] in groups
    assert sum(map(len, groups)) == len(stored)
    found = WeightReading(stored, CPU).finish()
    q, k, v = (found[f"{name}.weight"] for name in attention)
    assert q.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    assert (k.storage_offset(), v.storage_offset()) == (q.numel(), q.numel() + k.numel())


def test_what_differs_in_width_lies_alone() -> None:
    def stored(name: str, *shape: int) -> StoredTensor:
        return StoredTensor(name, Path("file"), "BF16", shape, 0, 2)

    found = together([stored("a.q_proj.weight", 4, 8), stored("a.k_proj.weight", 4, 9), stored("b.gate_proj.bias", 5)])
    assert [[member.name for member in group] for group in found] == [
        ["a.q_proj.weight"], ["a.k_proj.weight"], ["b.gate_proj.bias"],
    ]  # fmt: skip


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def lie(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 40) + path.read_bytes()[8:])


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def not_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


@pytest.mark.parametrize("spoil", [cut, lie, no_weights, no_config, not_json])
def test_files_that_are_not_whole_are_left_to_transformers_to_refuse(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(write(tmp_path, tensors()))
    assert readable(tmp_path) is None


@pytest.mark.parametrize(
    "config", [{"model_type": "mixtral"}, {"quantization_config": {"quant_method": "awq"}}, {"model_type": None}]
)
def test_other_families_and_quantised_weights_are_left_to_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    assert readable(write(tmp_path, tensors(), **config)) is None


def test_weights_of_other_dtypes_are_left_to_transformers(tmp_path: Path) -> None:
    assert readable(write(tmp_path, tensors(torch.float32))) is None
    assert readable(write(tmp_path, {**tensors(), "norm.weight": torch.ones(8)})) is None


def test_a_file_that_became_shorter_is_an_error_of_the_one_who_waits(tmp_path: Path) -> None:
    stored = readable(write(tmp_path, tensors()))
    assert stored is not None
    cut(tmp_path)
    with pytest.raises(OSError, match="became shorter while it was read"):
        WeightReading(stored, CPU).finish()


def test_a_thread_that_fails_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen gigabytes need not arrive for one that never will."""
    ended, fills = threading.Event(), []
    end = weight_reading._Shared.end

    def ends(pieces: Any) -> None:
        end(pieces)
        ended.set()

    def fill(*_: Any) -> None:
        fills.append(threading.get_ident())
        if len(fills) == 1:
            raise OSError("broken")
        ended.wait(2)

    monkeypatch.setattr(weight_reading, "CHUNK", 64)
    monkeypatch.setattr(weight_reading._Shared, "end", ends)
    monkeypatch.setattr(WeightReading, "_fill", fill)
    stored = readable(write(tmp_path, tensors()))
    assert stored is not None
    with pytest.raises(OSError, match="broken"):
        WeightReading(stored, CPU).finish()
    assert len(fills) <= weight_reading.THREADS


@pytest.mark.gpu
def test_a_gpu_gets_the_same_bytes_through_page_locked_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_reading, "CHUNK", 64)
    weights = tensors()
    stored = readable(write(tmp_path, weights, files=3))
    assert stored is not None
    found = WeightReading(stored, torch.device("cuda", 0)).finish()
    assert all(torch.equal(found[name].cpu(), tensor) for name, tensor in weights.items())
