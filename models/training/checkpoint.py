"""The checkpoints of one run: written whole, the newest whole one found again, the last few kept. No pickle anywhere.

Knows that a checkpoint has progress, tensors and whatever makes it servable; knows no model.
"""

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from models.training.errors import CheckpointError, OtherRunError
from models.training.folder import is_whole, remove_unfinished, write_folder
from models.training.plan import TrainingPlan
from models.training.report import StepReport

_log = logging.getLogger(__name__)

_STATE, _TENSORS, _PREFIX = "training_state.json", "training_state.safetensors", "step-"


@dataclass(frozen=True, slots=True)
class Identity:
    """What a run is a function of: a folder belongs to one. The model's name, not the place where its files are."""

    plan: TrainingPlan
    examples: str  # SHA-256
    validation: str


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come. Random numbers need no place here: every step draws its own from (seed, step)."""

    step: int = 0
    trained_tokens: int = 0
    skipped_in_a_row: int = 0  # steps whose gradient was not finite
    report: StepReport | None = None  # of the last step


class Checkpoints:
    """`folder/step-00000012/`, for one process at a time."""

    def __init__(self, folder: Path, identity: Identity, keep: int) -> None:
        if keep < 1:
            raise ValueError(f"at least one checkpoint must be kept, not {keep}")
        self.folder = folder
        self._identity = identity
        self._keep = keep

    def path(self, step: int) -> Path:
        return self.folder / f"{_PREFIX}{step:08d}"

    def newest(self) -> tuple[Progress, dict[str, Tensor]] | None:
        """The newest whole checkpoint, with what could not be one removed: torn ones, and what was being written.

        Raises OtherRunError when it belongs to another plan or other examples, CheckpointError when the disk does not
        tell; what is there stays then.
        """
        try:
            return self._newest()
        except OSError as error:
            raise CheckpointError(f"{self.folder.name} cannot be read: {error.strerror}") from error

    def _newest(self) -> tuple[Progress, dict[str, Tensor]] | None:
        remove_unfinished(self.folder)
        for path in self._paths():
            if not is_whole(path):
                _log.warning("checkpoint %s is torn: the one before it is used", path.name)
                shutil.rmtree(path)
                continue
            state: dict[str, Any] = json.loads((path / _STATE).read_bytes())
            self._check_identity(state)
            return _progress(state["progress"], path), load_file(path / _TENSORS)
        return None

    def write(self, progress: Progress, tensors: Mapping[str, Tensor], fill: Callable[[Path], None]) -> Path:
        """`fill` adds the files that make the checkpoint servable. Raises CheckpointError; older ones stay then."""
        path = self.path(progress.step)

        def write_files(folder: Path) -> None:
            fill(folder)
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / _TENSORS)
            identity = {
                "plan": self._identity.plan.to_json(),
                "examples": self._identity.examples,
                "validation": self._identity.validation,
            }
            report = progress.report
            shown = None if report is None else asdict(replace(report, checkpoint=None))
            state = {"identity": identity, "progress": {**asdict(progress), "report": shown}}
            (folder / _STATE).write_text(json.dumps(state, indent=1))

        write_folder(path, write_files)
        for old in self._paths()[self._keep :]:
            shutil.rmtree(old)
        return path

    def _paths(self) -> list[Path]:
        """The newest first. A folder that cannot be listed is an OSError, and no empty one, as for `Path.glob`."""
        try:
            return sorted((path for path in self.folder.iterdir() if path.name.startswith(_PREFIX)), reverse=True)
        except FileNotFoundError:
            return []

    def _check_identity(self, state: dict[str, Any]) -> None:
        theirs = state["identity"]
        differences = self._identity.plan.differences(TrainingPlan.from_json(theirs["plan"]))
        if differences:
            raise OtherRunError(f"{self.folder} belongs to another plan (mine / theirs): {', '.join(differences)}")
        for name, mine in (("examples", self._identity.examples), ("validation", self._identity.validation)):
            if theirs[name] != mine:
                raise OtherRunError(f"{self.folder} belongs to other {name}: their SHA-256 differs")


def _progress(state: dict[str, Any], path: Path) -> Progress:
    report = state.pop("report")
    return Progress(**state, report=None if report is None else StepReport(**{**report, "checkpoint": path}))
