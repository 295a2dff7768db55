"""LoRA models that learn call by call on one base model: Tinker's forward_backward and optim_step. One thread.

All models of a session share the base's weights; each has an adapter, gradients and an optimiser of its own. Knows no
HTTP, no owners and no order of calls.
"""

import logging
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor

from models.loader import LoadFormat
from models.registry import ModelSource
from models.training import datum as data_
from models.training import order
from models.training.adam import StepwiseAdam
from models.training.boundaries import rest_between_layers
from models.training.calls import PPO_CLIP, AdamParams, ClipRange, LossName, SessionSettings
from models.training.datum import Datum
from models.training.errors import DivergedError, PlanError
from models.training.losses import loss_sum
from models.training.out_of_memory import enough_memory
from models.training.pacing import Pacer
from models.training.plan import LoraSettings, TrainingPlan
from models.training.seeding import seeded
from models.training.self_check import check_packed_path
from models.training.session_weights import WeightsFolder
from models.training.targets import chosen_targets
from models.training.trainable import TrainableModel

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LossReport:
    """`logprobs`: float32 `[n]` on the host for each datum, of its targets."""

    loss: float  # the sum
    tokens: int
    clipped: int | None  # PPO: tokens
    logprobs: tuple[Tensor, ...]


@dataclass(slots=True)
class _Model:
    """One adapter and what learns it."""

    lora: LoraSettings
    seed: int
    optimizer: StepwiseAdam
    steps: int = 0
    calls: int = 0  # of forward_backward, since the model was made: where its dropout begins
    accumulated: int = 0  # of forward_backward, since the last step
    broken: str | None = None  # why the gradient is not what was asked for


class TrainingSession:
    """Loads the base model once. Raises what loading a model raises, UnsupportedModelError, PlanError."""

    def __init__(
        self,
        source: ModelSource,
        settings: SessionSettings,
        device: str | torch.device | None = None,
        *,
        load_format: LoadFormat = "auto",
        pacer: Pacer | None = None,
    ) -> None:
        self.settings = settings
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        plan = TrainingPlan(
            model=settings.model,
            dtype=settings.dtype,
            lora=LoraSettings(rank=1, alpha=1),  # PEFT wants an adapter from the start: this one is never used
            max_length=settings.max_length,
            max_model_len=settings.max_model_len,
            micro_batch_tokens=max(settings.micro_batch_tokens, settings.max_length),
            gradient_checkpointing=settings.gradient_checkpointing,
        )
        self._base = TrainableModel(plan, source, self.device, load_format)
        check_packed_path(self._base)
        if pacer is not None:
            rest_between_layers(self._base, pacer)
        assert self._base.adapter is not None
        self._peft = self._base.adapter
        self._unused: Any = self._peft.peft_config["default"]
        self._models: dict[str, _Model] = {}

    @property
    def vocab_size(self) -> int:
        return int(self._base.config.vocab_size)

    def create(self, name: str, lora: LoraSettings, seed: int) -> int:
        """A new model that gives the base's answers. How many parameters learn. Raises PlanError, OutOfMemoryError, and
        has then kept nothing.

        Its first weights are a function of `lora` and `seed`.
        """
        targets = chosen_targets("target_modules", lora.target_modules, self._unused.target_modules)
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=sorted(targets),
            exclude_modules=self._unused.exclude_modules,
            fan_in_fan_out=self._unused.fan_in_fan_out,
        )
        with enough_memory(f"{self.device} has too little memory for another model: unload one, or lower its rank"):
            try:
                self._models[name] = _Model(lora, seed, self._add_adapter(name, config, seed))
            except Exception:
                self._peft.peft_config.setdefault(name, config)  # PEFT forgets the name, and leaves it in the layers
                self._delete_adapter(name)
                raise
        return self._models[name].optimizer.num_parameters

    def _add_adapter(self, name: str, config: LoraConfig, seed: int) -> StepwiseAdam:
        with seeded(seed, self.device):
            self._peft.add_adapter(name, config, autocast_adapter_dtype=False)
        self._peft.peft_config[name].base_model_name_or_path = self.settings.model
        self._peft.set_adapter(name)
        parameters = {
            key.replace(f".{name}.", "."): parameter
            for key, parameter in self._peft.named_parameters()
            if f".{name}." in key
        }
        return StepwiseAdam(parameters, weight_decay=0.0, max_grad_norm=0.0)

    def _delete_adapter(self, name: str) -> None:
        self._peft.set_adapter("default")
        self._peft.delete_adapter(name)

    def remove(self, name: str) -> None:
        """Frees what only this model has. Raises KeyError."""
        del self._models[name]
        self._delete_adapter(name)

    def forward(self, name: str, data: Sequence[Datum], loss: LossName, clip: ClipRange = PPO_CLIP) -> LossReport:
        """Without gradient and dropout. Raises KeyError, ExampleError, OutOfMemoryError, DivergedError."""
        self._prepare(name, data, loss)
        with self._enough_memory(), self._base.evaluating():
            return self._losses(data, loss, clip, backward=False)

    def forward_backward(
        self, name: str, data: Sequence[Datum], loss: LossName, clip: ClipRange = PPO_CLIP
    ) -> LossReport:
        """Adds to the model's gradient. When it fails, what was added since the last step is void: no step is taken on
        a part of it. Raises as `forward` does."""
        model = self._models[name]
        try:
            self._prepare(name, data, loss)
            with self._enough_memory(), seeded(order.step_seed(model.calls, model.seed), self.device):
                report = self._losses(data, loss, clip, backward=True)
        except Exception as error:
            model.optimizer.discard_gradients()
            model.broken = str(error)
            raise
        model.calls += 1
        model.accumulated += 1
        return report

    def optim_step(self, name: str, params: AdamParams) -> float:
        """The gradient's norm, before clipping. The gradient is used up, whatever happens. Raises KeyError, PlanError
        when there is none, DivergedError when it is not finite, OutOfMemoryError; nothing is changed then."""
        model = self._models[name]
        broken, accumulated = model.broken, model.accumulated
        model.broken, model.accumulated = None, 0
        if broken is not None:
            raise PlanError(f"no step was taken: a forward_backward since the last one has failed ({broken})")
        if not accumulated:
            raise PlanError("no step was taken: there was no forward_backward since the last one")
        with enough_memory(f"{self.device} has too little memory for this step: unload a model, or lower its rank"):
            norm = model.optimizer.step_with(params)
        if not math.isfinite(norm):
            raise DivergedError(f"no step was taken: the gradient's norm is {norm}")
        model.steps += 1
        return norm

    def steps(self, name: str) -> int:
        """Optimiser steps behind the model's weights, as far as it knows."""
        return self._models[name].steps

    def save(self, name: str, folder: Path, *, optimizer: bool, files: dict[str, str]) -> None:
        """PEFT's format, and with `optimizer` everything that the next step depends on; `files`: texts beside it.

        Gradients are not saved. The folder appears whole, and replaces one that was there. Raises CheckpointError.
        """
        model = self._models[name]
        weights = WeightsFolder(folder)
        state = model.optimizer.state_tensors() if optimizer else None
        numbers = {"steps": model.steps, "calls": model.calls, "seed": model.seed}
        length = self._base.max_model_len
        weights.write(lambda place: self._base.save_adapter(place, name), state, numbers, files, length)

    def load(self, name: str, folder: Path, *, optimizer: bool) -> int:
        """Weights, and with `optimizer` what the next step depends on; else Adam begins anew. The gradient is
        discarded. How many steps are behind them (0 without `optimizer`). Raises CheckpointError, and nothing has
        changed then."""
        model = self._models[name]
        now = model.optimizer.state_tensors()
        equal = {"lora_alpha": model.lora.alpha, "r": model.lora.rank}  # shapes are compared besides
        check = self._base.check_factors
        tensors, numbers = WeightsFolder(folder).read(now, optimizer=optimizer, settings=equal, check=check)
        model.optimizer.load_state_tensors(tensors)
        model.optimizer.discard_gradients()
        model.steps, model.accumulated, model.broken = numbers.get("steps", 0), 0, None
        model.calls, model.seed = numbers.get("calls", model.calls), numbers.get("seed", model.seed)
        return model.steps

    def _prepare(self, name: str, data: Sequence[Datum], loss: LossName) -> None:
        if name not in self._models:
            raise KeyError(name)
        data_.check(data, loss, vocab_size=self.vocab_size, max_length=self.settings.max_length)
        if self._peft.active_adapter != name:
            self._peft.set_adapter(name)

    def _losses(self, data: Sequence[Datum], loss: LossName, clip: ClipRange, *, backward: bool) -> LossReport:
        outputs: dict[int, Tensor] = {}
        total, clipped = 0.0, 0
        for batch in data_.batches(data, self.settings.micro_batch_tokens, self.device):
            logprobs, _ = self._base.logprobs(batch.packed)
            sums = loss_sum(loss, logprobs, batch.weights, batch.logprobs, batch.advantages, clip)
            value = float(sums.loss.detach())
            if not math.isfinite(value):
                raise DivergedError(f"the {loss} loss is {value}: look at logprobs, advantages and weights")
            if backward:
                sums.loss.backward()
            total += value
            clipped += 0 if sums.clipped is None else int(sums.clipped)
            outputs.update(zip(batch.packed.indices, logprobs.detach().cpu().split(batch.packed.learnt), strict=True))
        ordered = tuple(outputs[index] for index in range(len(data)))
        return LossReport(total, sum(map(len, data)), clipped if loss == "ppo" else None, ordered)

    def _enough_memory(self) -> AbstractContextManager[None]:
        return enough_memory(
            f"{self.device} has too little memory for this call: send shorter sequences (they are packed into forwards "
            f"of {self.settings.micro_batch_tokens} tokens)"
        )
