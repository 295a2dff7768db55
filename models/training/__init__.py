"""Fine-tuning: LoRA and full, supervised and DPO, resumed bit for bit. Knows no HTTP, no SQL, no tenants.

Importing this room is light: torch comes in with `Trainer` and `TrainingSession`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from models.training.calls import (
    ALLOWED_INPUTS,
    REQUIRED_INPUTS,
    AdamParams,
    ClipRange,
    LossName,
    SessionSettings,
)
from models.training.errors import (
    CheckpointError,
    DiskFullError,
    DivergedError,
    ExampleError,
    ModelTooLargeError,
    OtherRunError,
    OutOfMemoryError,
    PlanError,
    TrainingError,
)
from models.training.examples import Example, Preference
from models.training.pacing import Pacer
from models.training.plan import LoraSettings, TrainingPlan
from models.training.report import Outcome, StepReport, Verdict
from models.unused_packages import without_hub_kernels

if TYPE_CHECKING:
    from models.training.datum import Datum
    from models.training.session import LossReport, TrainingSession
    from models.training.trainer import Trainer

_WITH_TORCH = {"Datum": "datum", "LossReport": "session", "Trainer": "trainer", "TrainingSession": "session"}


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        with without_hub_kernels():  # PEFT imports bitsandbytes
            return getattr(import_module(f"models.training.{_WITH_TORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "ALLOWED_INPUTS",
    "REQUIRED_INPUTS",
    "AdamParams",
    "CheckpointError",
    "ClipRange",
    "Datum",
    "DiskFullError",
    "DivergedError",
    "Example",
    "ExampleError",
    "LoraSettings",
    "LossName",
    "LossReport",
    "ModelTooLargeError",
    "OtherRunError",
    "OutOfMemoryError",
    "Outcome",
    "Pacer",
    "PlanError",
    "Preference",
    "SessionSettings",
    "StepReport",
    "Trainer",
    "TrainingError",
    "TrainingPlan",
    "TrainingSession",
    "Verdict",
]
