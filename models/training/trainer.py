"""The training loop that resumes exactly."""

from collections.abc import Callable
from pathlib import Path

import torch

from models.training.examples import TrainingData
from models.training.plan import TrainingPlan
from models.training.report import Outcome, StepReport, Verdict


class Trainer:
    """One run in one folder: `folder/checkpoints/` while it lasts, `folder/result/` when it is done."""

    def __init__(
        self,
        plan: TrainingPlan,
        examples: TrainingData,
        validation: TrainingData | None,
        folder: Path,
        device: str | torch.device | None = None,
        *,
        keep_checkpoints: int = 3,
    ) -> None:
        raise NotImplementedError

    @property
    def total_steps(self) -> int:
        raise NotImplementedError

    def run(self, on_step: Callable[[StepReport], Verdict]) -> Outcome:
        """Trains from the newest whole checkpoint (or the start) to the end, or to a verdict."""
        raise NotImplementedError
