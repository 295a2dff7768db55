"""Folders that are no adapter of this model are refused with the reason, and change nothing."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from random_adapters import LIMITS, PackedBatch, family, save_adapter
from safetensors.torch import load_file, save_file
from tiny_models import random_model, tiny_config

from models.batch import NO_ADAPTER
from models.errors import AdapterError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PROMPTS = [[5, 6, 7, 8], list(range(3, 30))]


@pytest.fixture(scope="module")
def batch() -> PackedBatch:
    return PackedBatch(family("llama"))


@pytest.fixture
def folder(batch: PackedBatch, tmp_path: Path) -> Path:
    save_adapter(batch.model, tmp_path / "adapter", seed=1)
    return tmp_path / "adapter"


def refused(batch: PackedBatch, folder: Path | str, within: Path | None = None) -> str:
    """The reason; nothing of the adapter is kept, and the model answers as before."""
    before = batch.logits(PROMPTS, [NO_ADAPTER, NO_ADAPTER])
    with pytest.raises(AdapterError) as error:
        batch.slots.read(7, str(folder), None if within is None else str(within))
    with pytest.raises(KeyError):
        batch.slots.place(7, 0)
    assert all(map(torch.equal, before, batch.logits(PROMPTS, [NO_ADAPTER, 0])))
    return str(error.value)


def change_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, **fields}))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def test_the_folder_that_peft_saved_is_read_and_described(batch: PackedBatch, folder: Path) -> None:
    facts = batch.slots.read(1, str(folder))
    assert (facts.rank, facts.num_layers, len(facts.digest)) == (8, 3 * 7, 64)
    assert batch.slots.read(1, str(folder)) == facts, "the digest is of the content"
    os.utime(folder / WEIGHTS, (0, 1_700_000_000.9))
    assert batch.slots.read(1, str(folder)) == replace(facts, written=1_700_000_000)
    change_weights(folder, lambda tensors: next(iter(tensors.values())).add_(1))
    assert batch.slots.read(1, str(folder)).digest != facts.digest
    batch.slots.drop(1)


def test_pickles_are_never_opened(batch: PackedBatch, folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    assert "only adapter_model.bin (such files can run code" in refused(batch, folder)


def test_missing_pieces_are_named(batch: PackedBatch, folder: Path, tmp_path: Path) -> None:
    assert "there is no folder" in refused(batch, tmp_path / "nowhere")
    assert "no weights" in refused(batch, tmp_path)
    (folder / CONFIG).unlink()
    assert f"has no {CONFIG}" in refused(batch, folder)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"peft_type": "IA3"}, 'peft_type is "IA3"'),
        ({"peft_type": None}, "peft_type is null"),
        ({"bias": "all"}, 'bias is "all"'),
        ({"use_dora": True}, "use_dora is true"),
        ({"modules_to_save": ["lm_head"]}, 'modules_to_save is ["lm_head"]'),
        ({"lora_bias": True}, "lora_bias is true"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is [1]"),
        ({"target_parameters": ["experts.w"]}, "target_parameters is"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens is [1, 2]"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication is"),
        ({"something_new": 3}, "something_new is 3"),
        ({"init_lora_weights": "pissa"}, 'init_lora_weights is "pissa"'),
        ({"init_lora_weights": "olora"}, 'init_lora_weights is "olora"'),
        ({"r": 4}, "rank 4 need [4, 96]"),
        ({"r": 17}, "its rank is 17"),
        ({"r": True}, "r is true, not a rank"),
        ({"r": "8"}, 'r is "8", not a rank'),
        ({"lora_alpha": None}, "lora_alpha is null"),
        ({"lora_alpha": 1e400}, "lora_alpha is Infinity"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000"),
        ({"lora_alpha": 1e41}, "are not finite in float32"),
        ({"use_rslora": "yes"}, "use_rslora is"),
        ({"rank_pattern": [1]}, "rank_pattern is [1], not an object"),
        ({"rank_pattern": {"(a+)+": 1}}, 'rank_pattern has the key "(a+)+"'),
        ({"rank_pattern": {"q_proj\\": 8}}, "rank_pattern has the key"),
        ({"alpha_pattern": {"q_proj": "x"}}, 'alpha_pattern is "x"'),
    ],
)  # fmt: skip
def test_configurations_that_are_not_plain_lora_are_refused(
    batch: PackedBatch, folder: Path, fields: dict[str, Any], reason: str
) -> None:
    change_config(folder, **fields)
    assert reason in refused(batch, folder)


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b"9" * 5000])
def test_a_configuration_that_is_no_object_is_refused(batch: PackedBatch, folder: Path, text: bytes) -> None:
    (folder / CONFIG).write_bytes(text)
    assert "adapter_config.json" in refused(batch, folder)


def _rename(tensors: dict[str, torch.Tensor], old: str, new: str) -> None:
    for key in list(tensors):
        tensors[key.replace(old, new)] = tensors.pop(key)


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: tensors.clear(), "adapts no layer"),
        (lambda tensors: tensors.pop(f"{Q}.lora_A.weight"), "only lora_B for model.layers.0.self_attn.q_proj"),
        (lambda tensors: _rename(tensors, "q_proj", "q_norm"), "self_attn.q_norm, which is no linear"),
        (lambda tensors: _rename(tensors, "layers.2", "layers.3"), "layers.3"),
        (lambda tensors: _rename(tensors, "model.layers.0.self_attn.q_proj", "lm_head"), "adapts lm_head, which is no"),
        (lambda tensors: tensors.update({f"{Q}.weight": torch.zeros(2, 2)}), "not whole layers (modules_to_save)"),
        (lambda tensors: tensors.update({f"{Q}.lora_magnitude_vector": torch.zeros(2)}), "not DoRA"),
        (lambda tensors: tensors.update({f"{Q}.lora_B.bias": torch.zeros(2)}), "not with biases"),
        (lambda tensors: tensors.update({"x.lora_embedding_A": torch.zeros(2)}), "not on embeddings"),
        (lambda tensors: tensors[f"{Q}.lora_A.weight"].fill_(torch.nan), "are not finite in float32"),
        (lambda tensors: tensors.update({f"{Q}.lora_A.weight": torch.zeros(8, 64, dtype=torch.int8)}), "are int8 and"),
        (lambda tensors: tensors.update({f"{Q}.lora_A.weight": torch.zeros(8 * 64)}), "[512] and [64, 8]"),
    ],
)  # fmt: skip
def test_tensors_that_are_no_factors_of_the_models_layers_are_refused(
    batch: PackedBatch, folder: Path, change: Callable[[dict[str, torch.Tensor]], object], reason: str
) -> None:
    change_weights(folder, change)
    assert reason in refused(batch, folder)


def test_an_adapter_of_another_model_says_whose_it_is(batch: PackedBatch, tmp_path: Path) -> None:
    save_adapter(random_model(tiny_config(hidden_size=32)), tmp_path, seed=1)
    change_config(tmp_path, base_model_name_or_path="someone/another-model")
    said = refused(batch, tmp_path)
    assert "(it was trained for someone/another-model)" in said
    assert "[8, 96]" in said


def test_damaged_and_oversized_files_are_refused(batch: PackedBatch, folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    for damaged in (b"", whole[:-1], whole + b"x", b"\xff" * 64, b"\x00" * 64):
        (folder / WEIGHTS).write_bytes(damaged)
        assert "damaged" in refused(batch, folder)
    with (folder / WEIGHTS).open("wb") as file:
        file.truncate(1 << 32)  # takes no room on the disk
    assert "larger than" in refused(batch, folder)
    (folder / CONFIG).write_bytes(b" " * (1 << 21))
    assert f"{CONFIG} is larger than" in refused(batch, folder)


def test_what_is_no_regular_file_is_not_waited_for(batch: PackedBatch, folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)
    assert "no regular file" in refused(batch, folder)
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()
    assert WEIGHTS in refused(batch, folder)


def test_folders_and_links_out_of_the_allowed_folder_are_refused(
    batch: PackedBatch, folder: Path, tmp_path: Path
) -> None:
    allowed = tmp_path / "allowed"
    shutil.copytree(folder, allowed / "good")
    assert batch.slots.read(1, "good", str(allowed)).rank == 8
    assert batch.slots.read(1, str(allowed / "good"), str(allowed)).rank == 8
    batch.slots.drop(1)
    (allowed / "linked").symlink_to(folder)
    (allowed / "loop").symlink_to(allowed / "loop")
    shutil.copytree(folder, allowed / "inside")
    (allowed / "inside" / WEIGHTS).unlink()
    (allowed / "inside" / WEIGHTS).symlink_to(folder / WEIGHTS)
    for path in (
        "../adapter", str(folder), "..", "/", "/etc", "linked", "inside", "good/../../adapter", "loop", "a\0b",
    ):  # fmt: skip
        said = refused(batch, path, allowed)
        assert "is not in the folder that adapters may be loaded from" in said, path
        assert str(allowed) not in said
    there, missing = (refused(batch, path, allowed) for path in ("../adapter", "../missing"))
    assert there == missing.replace("missing", "adapter")
    assert "cannot be read: File name too long" in refused(batch, "x" * 5000, allowed)
    (allowed / "good" / "more").symlink_to(allowed / "good")  # a link that stays inside is a folder like any other
    assert batch.slots.read(1, "good/more", str(allowed)).rank == 8
    batch.slots.drop(1)


def test_ranks_up_to_the_limit_are_taken(batch: PackedBatch, tmp_path: Path) -> None:
    save_adapter(batch.model, tmp_path / "most", seed=1, r=LIMITS.max_lora_rank)
    assert batch.slots.read(1, str(tmp_path / "most")).rank == LIMITS.max_lora_rank
    batch.slots.drop(1)
    save_adapter(batch.model, tmp_path / "more", seed=1, r=LIMITS.max_lora_rank + 1)
    assert "takes ranks up to 16 (max_lora_rank)" in refused(batch, tmp_path / "more")
