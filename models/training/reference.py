"""The frozen model's log-probabilities, which DPO compares with.

LoRA: the same model with its adapter off, asked for every batch. Full tuning: there is no frozen model beside the one
that learns, so all of them are computed before the first step and kept in a folder of their own.
"""

import hashlib
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.training import examples as data
from models.training import objectives, packing
from models.training.folder import is_whole, write_folder
from models.training.packing import PackedBatch
from models.training.plan import TrainingPlan
from models.training.trainable import TrainableModel

_FILE = "reference.safetensors"


class References:
    """float32 `[pairs, 2]` per batch: of the chosen and of the rejected answer."""

    def __init__(self, model: TrainableModel, plan: TrainingPlan, checkpoints: Path) -> None:
        self._model, self._plan = model, plan
        self._folder = checkpoints / "reference"
        self._kept: dict[str, Tensor] = {}  # [examples, 2] by data set

    def prepare(self, **examples: data.TrainingData) -> None:
        """For each named data set. The model must be as it was loaded."""
        if self._model.adapter is not None:
            return
        digests = {name: data.digest(examples_) for name, examples_ in examples.items()}
        digests["plan"] = hashlib.sha256(self._plan.to_json().encode()).hexdigest()
        if not (is_whole(self._folder) and _digests(self._folder) == digests):
            tensors = {name: self._compute(examples_) for name, examples_ in examples.items() if examples_}

            def write(folder: Path) -> None:
                save_file(tensors, folder / _FILE)
                for name, digest in digests.items():
                    (folder / f"{name}.sha256").write_text(digest)

            write_folder(self._folder, write)
        self._kept = {name: tensor.to(self._model.device) for name, tensor in load_file(self._folder / _FILE).items()}

    def of(self, which: str, batch: PackedBatch) -> Tensor:
        if self._model.adapter is not None:
            return objectives.reference_logprobs(self._model, batch)
        return self._kept[which][torch.tensor(batch.indices, device=self._model.device)]

    def _compute(self, examples: data.TrainingData) -> Tensor:
        kept = torch.empty(len(examples), 2)
        for indices in packing.pack(examples, range(len(examples)), self._plan.micro_batch_tokens):
            batch = packing.build(examples, indices, self._model.device)
            kept[list(indices)] = objectives.reference_logprobs(self._model, batch).cpu()
        return kept


def _digests(folder: Path) -> dict[str, str]:
    return {path.stem: path.read_text() for path in folder.glob("*.sha256")}
