"""Everything that determines a training run's result, as data: what is trained, how, and in which order.

Knows no tensor, so a process without torch can make, check and store one.
"""

import json
import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from models.training.errors import PlanError

Method = Literal["supervised", "dpo"]
Schedule = Literal["cosine", "linear", "constant"]
TrainingDType = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Hu et al. 2021: every target's weight W becomes W + alpha / rank * B A; B starts at 0. PEFT's names."""

    rank: int = 16
    alpha: int = 32
    dropout: float = 0.0
    target_modules: tuple[str, ...] | None = None  # names of linears; None: all of the decoder layers


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """A run is a function of its plan and its examples. Raises PlanError for what nothing could carry out."""

    model: str  # a folder, a hub id or the bundled model's name
    dtype: TrainingDType = "auto"  # of weights and activations; "auto": bfloat16 on a GPU, float32 on a CPU
    method: Method = "supervised"
    n_epochs: int = 3
    batch_size: int = 8  # examples an optimiser step (the last one of an epoch may have fewer)
    learning_rate: float = 1e-4
    schedule: Schedule = "cosine"
    warmup_ratio: float = 0.03  # of all steps
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0  # 0: no clipping
    lora: LoraSettings | None = LoraSettings()  # None: full fine-tuning
    max_length: int = 2048  # tokens an example may have; a preference's two answers each
    max_model_len: int | None = (
        None  # of the engine that will serve it: decides LongRoPE's factors; None: all positions
    )
    micro_batch_tokens: int = 4096  # tokens of one forward: examples are packed up to it
    gradient_checkpointing: bool = True  # layers are computed again in the backward pass, where it saves enough memory
    recompute_attention: bool = False  # their attention too: slower, half the memory a token, the same bits
    seed: int = 0
    checkpoint_every: int = 10  # steps
    dpo_beta: float = 0.1
    deterministic: bool = False  # torch.use_deterministic_algorithms; a CPU repeats bitwise without it

    def __post_init__(self) -> None:
        self._one_of("dtype", TrainingDType)
        self._one_of("method", Method)
        self._one_of("schedule", Schedule)
        for name in ("n_epochs", "batch_size", "checkpoint_every"):
            self._between(name, getattr(self, name), 1, math.inf, whole=True)
        self._between("max_length", self.max_length, 2, math.inf, whole=True)
        if self.max_model_len is not None:
            self._between("max_model_len", self.max_model_len, 2, math.inf, whole=True)
        self._between("seed", self.seed, 0, 2**63 - 1, whole=True)
        self._between("learning_rate", self.learning_rate, 0, 1)
        self._between("warmup_ratio", self.warmup_ratio, 0, 1)
        self._between("weight_decay", self.weight_decay, 0, 1)
        self._between("max_grad_norm", self.max_grad_norm, 0, math.inf)
        if not 0 < self.dpo_beta < math.inf:
            raise PlanError(f"dpo_beta must be positive and finite, not {self.dpo_beta!r}")
        if not self.model:
            raise PlanError("model must name a folder, a hub id (owner/name) or the bundled model")
        sequences = 2 if self.method == "dpo" else 1
        if self.micro_batch_tokens < sequences * self.max_length:
            both = " (an example has two answers)" if sequences == 2 else ""
            raise PlanError(
                f"micro_batch_tokens {self.micro_batch_tokens} must be at least {sequences * self.max_length}, "
                f"so that an example of max_length {self.max_length} fits into one forward{both}"
            )
        if self.lora is not None:
            self._between("lora.rank", self.lora.rank, 1, 1024, whole=True)
            self._between("lora.alpha", self.lora.alpha, 1, math.inf, whole=True)
            if not 0 <= self.lora.dropout < 1:
                raise PlanError(f"lora.dropout must be at least 0 and below 1, not {self.lora.dropout!r}")
            if self.lora.target_modules is not None and not self.lora.target_modules:
                raise PlanError("lora.target_modules must name at least one linear layer (None: all of them)")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "TrainingPlan":
        """Raises PlanError for JSON that is no plan: unknown fields too."""
        try:
            raw: Any = json.loads(text)
            lora = raw.get("lora")
            if lora is not None:
                if lora.get("target_modules") is not None:
                    lora["target_modules"] = tuple(lora["target_modules"])
                raw["lora"] = LoraSettings(**lora)
            return cls(**raw)
        except (TypeError, AttributeError, json.JSONDecodeError) as error:
            raise PlanError(f"not a training plan: {error}") from error

    def differences(self, other: "TrainingPlan") -> list[str]:
        """The fields that differ, for a person: "learning_rate 0.0001 / 0.0002"."""
        pairs = [(f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
        return [f"{name} {mine} / {theirs}" for name, mine, theirs in pairs if mine != theirs]

    def _one_of(self, name: str, allowed: Any) -> None:
        if getattr(self, name) not in get_args(allowed):
            raise PlanError(f"{name} must be one of {', '.join(get_args(allowed))}, not {getattr(self, name)!r}")

    @staticmethod
    def _between(name: str, value: float, low: float, high: float, *, whole: bool = False) -> None:
        if isinstance(value, bool) or (whole and not isinstance(value, int)) or not low <= value <= high:
            bound = f"at least {low}" if high == math.inf else f"from {low} to {high}"
            raise PlanError(f"{name} must be {'a whole number ' if whole else ''}{bound}, not {value!r}")
