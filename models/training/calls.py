"""What a training session is asked for, as data: loss functions, their inputs, the numbers of an optimiser step.

Names, defaults and meanings are Tinker's (https://tinker-docs.thinkingmachines.ai). Knows no tensor.
"""

from dataclasses import dataclass
from typing import Literal

from models.training.plan import TrainingDType

LossName = Literal["cross_entropy", "importance_sampling", "ppo"]

#: Beside the targets: what a loss cannot do without, and what it takes (weights: 1 where they are not given).
REQUIRED_INPUTS: dict[LossName, tuple[str, ...]] = {
    "cross_entropy": (),
    "importance_sampling": ("logprobs", "advantages"),
    "ppo": ("logprobs", "advantages"),
}
ALLOWED_INPUTS: dict[LossName, tuple[str, ...]] = {
    name: ("weights", *required) for name, required in REQUIRED_INPUTS.items()
}


@dataclass(frozen=True, slots=True)
class ClipRange:
    """Of PPO's probability ratio: Schulman et al. 2017 with epsilon 0.2."""

    low: float = 0.8
    high: float = 1.2


PPO_CLIP = ClipRange()


@dataclass(frozen=True, slots=True)
class AdamParams:
    """Of one step: every step brings its own. Weight decay is decoupled (AdamW)."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0  # 0: no clipping


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """What all models of a session share."""

    model: str  # the name that saved adapters give their base model
    max_length: int  # tokens of one datum
    micro_batch_tokens: int  # tokens of one forward: data are packed up to it
    max_model_len: int | None = None  # of the engine that samples: decides LongRoPE's factors; None: all positions
    dtype: TrainingDType = "auto"
    gradient_checkpointing: bool = True
