"""The learning rate of a step. Pure arithmetic: knows no optimiser."""

import math

from models.training.plan import TrainingPlan


def learning_rate(plan: TrainingPlan, step: int, total_steps: int) -> float:
    """Of step `step`, counted from 0: a linear warm-up, then to 0 along half a cosine or a line, or constant."""
    warmup = math.ceil(plan.warmup_ratio * total_steps)
    if step < warmup:
        return plan.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(total_steps - warmup, 1)
    match plan.schedule:
        case "cosine":
            return plan.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
        case "linear":
            return plan.learning_rate * (1 - progress)
        case "constant":
            return plan.learning_rate
