"""Fine-tuning: LoRA and full, supervised and DPO, resumed bit for bit. Knows no HTTP, no SQL, no tenants.

Importing this room is light: torch comes in with `Trainer`.
"""

from typing import TYPE_CHECKING, Any

from models.training.errors import (
    CheckpointError,
    DivergedError,
    ExampleError,
    OutOfMemoryError,
    PlanError,
    TrainingError,
)
from models.training.examples import Example, Preference
from models.training.plan import LoraSettings, TrainingPlan
from models.training.report import Outcome, StepReport, Verdict

if TYPE_CHECKING:
    from models.training.trainer import Trainer


def __getattr__(name: str) -> Any:
    if name == "Trainer":
        from models.training.trainer import Trainer

        return Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "CheckpointError",
    "DivergedError",
    "Example",
    "ExampleError",
    "LoraSettings",
    "OutOfMemoryError",
    "Outcome",
    "PlanError",
    "Preference",
    "StepReport",
    "Trainer",
    "TrainingError",
    "TrainingPlan",
    "Verdict",
]
