"""What a run tells after every step, what it is told in return, and how it ended. Knows no tensor."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path


@dataclass(frozen=True, slots=True)
class StepReport:
    """One optimiser step. After a crash, steps since the last checkpoint are computed and reported again.

    Supervised: the loss is the mean cross-entropy of the learnt tokens, in nats. DPO: the mean loss of the pairs; the
    token accuracy is then that of the preferred answers. A loss that is not finite means a step that changed nothing.
    """

    step: int  # from 1
    total_steps: int
    train_loss: float
    train_mean_token_accuracy: float
    valid_loss: float | None  # at checkpoints only, and only with validation data
    valid_mean_token_accuracy: float | None
    learning_rate: float
    tokens: int  # that went through the model in this step, learnt or not
    seconds: float
    checkpoint: Path | None  # the folder written after this step
    train_reward_accuracy: float | None = None  # DPO: the fraction of pairs that are ranked as wanted


class Verdict(Enum):
    """What to do after a step."""

    CONTINUE = "continue"
    PAUSE = "pause"  # write a checkpoint, then return
    CANCEL = "cancel"  # return at once


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    finished: bool
    steps: int  # done since the very beginning
    trained_tokens: int  # of all these steps
    result: Path | None  # the folder of the adapter, or of the whole model, when finished
