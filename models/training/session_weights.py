"""Saved weights of one model of a session: an adapter in PEFT's format, perhaps with its optimiser's state. No pickle.

Written whole or not at all; read only when every file has the SHA-256 of the manifest. Knows no model.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.training.errors import CheckpointError
from models.training.folder import is_whole, write_folder

_STATE, _TENSORS = "optimizer_state.json", "optimizer_state.safetensors"
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TRAINING = "training.json"  # how the weights came about
_WEIGHT = "weight/"  # Optimizer.state_tensors' prefix


class WeightsFolder:
    def __init__(self, path: Path) -> None:
        self.path = path

    def write(
        self,
        adapter: Callable[[Path], None],
        state: Mapping[str, Tensor] | None,
        numbers: Mapping[str, int],
        files: Mapping[str, str],
        max_model_len: int,
    ) -> None:
        """`adapter` writes PEFT's two files; `numbers` go with the state. Raises CheckpointError."""

        def fill(folder: Path) -> None:
            adapter(folder)
            (folder / _TRAINING).write_text(json.dumps({"max_model_len": max_model_len}))
            if state is not None:
                save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / _TENSORS)
                (folder / _STATE).write_text(json.dumps(dict(numbers)))
            for name, text in files.items():
                (folder / name).write_text(text)

        write_folder(self.path, fill)

    def read(
        self,
        now: Mapping[str, Tensor],
        *,
        optimizer: bool,
        settings: Mapping[str, object],
        check: Callable[[int | None], None],
    ) -> tuple[dict[str, Tensor], dict[str, int]]:
        """What replaces `now` (an optimiser's state tensors), and the numbers that went with it. Without `optimizer`:
        the weights, moments of zero, no numbers. `check` is given the weights' max_model_len, None where none was
        recorded. Raises CheckpointError, and what `check` raises."""
        if not is_whole(self.path):
            raise CheckpointError("the weights are not there, or a file of them is damaged")
        config: dict[str, Any] = json.loads((self.path / _CONFIG).read_bytes())
        for name, mine in settings.items():
            if config.get(name) != mine:
                raise CheckpointError(f"the weights have {name} {config.get(name)}, this model has {mine}")
        check(self._max_model_len())
        has_state = (self.path / _TENSORS).exists()
        if optimizer and not has_state:
            raise CheckpointError("the weights were saved without the optimiser's state: load them without it")
        if has_state:
            saved = load_file(self.path / _TENSORS)
        else:
            saved = {f"{_WEIGHT}{name}": tensor for name, tensor in load_file(self.path / _WEIGHTS).items()}
        weights = {name for name in now if name.startswith(_WEIGHT)}
        if {name for name in saved if name.startswith(_WEIGHT)} != weights:
            raise CheckpointError("the weights are of other layers than this model's: its target_modules differ")
        for name in weights:
            if saved[name].shape != now[name].shape:
                raise CheckpointError(
                    f"the weights have another shape than this model's ({name.removeprefix(_WEIGHT)})"
                )
        if optimizer:
            return saved, json.loads((self.path / _STATE).read_bytes())
        return {name: saved[name] if name in weights else torch.zeros_like(value) for name, value in now.items()}, {}

    def _max_model_len(self) -> int | None:
        path = self.path / _TRAINING
        return int(json.loads(path.read_bytes())["max_model_len"]) if path.exists() else None
