"""The training loop that resumes exactly: steps, reports, checkpoints, the result. One run in one folder.

Whatever happens between two checkpoints can happen again: a step is a function of (plan, examples, weights, step).
"""

import fcntl
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from models import registry
from models.registry import ModelSource
from models.training import examples as data
from models.training import objectives, order, packing
from models.training.boundaries import rest_between_layers
from models.training.checkpoint import Checkpoints, Identity, Progress
from models.training.errors import CheckpointError, DivergedError, ExampleError, OtherRunError, OutOfMemoryError
from models.training.folder import is_whole, remove_unfinished, write_folder
from models.training.objectives import Sums
from models.training.optimizer import Optimizer
from models.training.out_of_memory import enough_memory, leave_spare, room_for_training
from models.training.pacing import Pacer
from models.training.packing import PackedBatch
from models.training.plan import TrainingPlan
from models.training.reference import References
from models.training.report import Outcome, StepReport, Verdict
from models.training.schedule import learning_rate
from models.training.seeding import seeded
from models.training.self_check import check_packed_path
from models.training.size import GIB
from models.training.totals import Means, Totals
from models.training.trainable import TrainableModel

_log = logging.getLogger(__name__)

#: Steps in a row whose gradient is not finite, after which a run is given up.
MAX_SKIPPED = 3

OnStep = Callable[[StepReport], Verdict]


class Trainer:
    """`folder/checkpoints/` while a run lasts, `folder/result/` when it is done. One process at a time."""

    def __init__(
        self,
        plan: TrainingPlan,
        examples: data.TrainingData,
        validation: data.TrainingData | None,
        folder: Path,
        device: str | torch.device | None = None,
        *,
        source: ModelSource | None = None,
        keep_checkpoints: int = 3,
        pacer: Pacer | None = None,
        spare_bytes: int = 0,
        chat_template: str | None = None,
    ) -> None:
        """device None: the GPU if there is one. `source`: where the plan's model is; None: where its name says. It may
        be elsewhere when the run goes on. `pacer`: lets the run rest between layers. `spare_bytes`: of what a GPU has
        free when the model is loaded, so much stays free for others. `chat_template`: which
        a whole model brings in its folder, where that is not the source's own.

        Raises ModelNotFoundError and ExampleError; loads nothing yet.
        """
        self._source = source or registry.resolve(plan.model)
        data.check(examples, plan)
        if validation:
            with _of_validation():
                data.check(validation, plan)
        self._plan, self._examples, self._validation = plan, examples, validation or ()
        self._folder, self._pacer, self._spare = folder, pacer, spare_bytes
        self._chat_template = chat_template
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        identity = Identity(plan, data.digest(examples), data.digest(self._validation))
        self._checkpoints = Checkpoints(folder / "checkpoints", identity, keep_checkpoints)
        self._trying = "the base model"  # or the forward that is computed, in words

    @property
    def total_steps(self) -> int:
        return self._plan.n_epochs * order.steps_per_epoch(len(self._examples), self._plan.batch_size)

    def run(self, on_step: OnStep) -> Outcome:
        """Trains from the newest whole checkpoint (or the start) to the end, or to a verdict.

        A resumed run first reports the step of its checkpoint once more: what was told last may not have arrived. A
        pause after a step without a checkpoint reports it once more, with the one that is written then.

        Raises TrainingError and what loading a model raises.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        advice = (
            f"{self._device} has too little memory for this plan: lower micro_batch_tokens "
            f"({self._plan.micro_batch_tokens}) and max_length ({self._plan.max_length}), or turn on "
            "gradient_checkpointing"
        )
        try:
            with _only_process(self._folder / "lock"), enough_memory(advice), _deterministic(self._plan.deterministic):
                return self._run(on_step)
        except OutOfMemoryError as error:
            room = room_for_training(self._device, self._spare)
            have = "memory" if room is None else f"{room / GIB:.2f} GiB"
            error.what = f"{self._trying} did not fit into the {have} of {self._device} that training can have"
            raise

    def _run(self, on_step: OnStep) -> Outcome:
        remove_unfinished(self._folder)
        saved = self._checkpoints.newest()
        progress = Progress() if saved is None else saved[0]
        result = self._folder / "result"
        if progress.report is not None and on_step(progress.report) is not Verdict.CONTINUE:
            return Outcome(False, progress.step, progress.trained_tokens, None)
        if progress.step == self.total_steps and is_whole(result):
            return Outcome(True, progress.step, progress.trained_tokens, result)
        self._load()
        if saved is not None:
            self._restore(saved[1])
            del saved
            _log.info("resumed after step %d of %d", progress.step, self.total_steps)
        while progress.step < self.total_steps:
            progress = self._step(progress)
            assert progress.report is not None
            verdict = on_step(progress.report)
            if verdict is Verdict.PAUSE and progress.report.checkpoint is None:
                on_step(replace(progress.report, checkpoint=self._save(progress)))
            if verdict is not Verdict.CONTINUE:
                return Outcome(False, progress.step, progress.trained_tokens, None)
        write_folder(result, lambda folder: self._model.save_result(folder, self._chat_template))
        return Outcome(True, progress.step, progress.trained_tokens, result)

    def _load(self) -> None:
        leave_spare(self._device, self._spare)
        self._model = TrainableModel(self._plan, self._source, self._device)
        data.check_vocabulary(self._examples, self._model.config.vocab_size)
        with _of_validation():
            data.check_vocabulary(self._validation, self._model.config.vocab_size)
        check_packed_path(self._model)
        if self._pacer is not None:
            rest_between_layers(self._model, self._pacer)
        self._references: References | None = None
        if self._plan.method == "dpo":  # before any weight has changed
            self._trying = f"forwards of up to {self._plan.micro_batch_tokens} tokens"
            self._references = References(self._model, self._plan, self._checkpoints.folder)
            self._references.prepare(train=self._examples, validation=self._validation)
        self._optimizer = Optimizer(
            self._model.parameters, weight_decay=self._plan.weight_decay, max_grad_norm=self._plan.max_grad_norm
        )

    def _restore(self, tensors: dict[str, Tensor]) -> None:
        """Raises OtherRunError for what does not fit the model."""
        mine = {name: tensor.shape for name, tensor in self._optimizer.state_tensors().items()}
        if mine != {name: tensor.shape for name, tensor in tensors.items()}:
            raise OtherRunError(f"{self._checkpoints.folder} belongs to a {self._source.name} of another shape")
        self._optimizer.load_state_tensors(tensors)

    def _step(self, before: Progress) -> Progress:
        """One optimiser step, with its checkpoint where one is due."""
        plan, begin = self._plan, time.monotonic()
        indices = order.step_examples(before.step, len(self._examples), plan.batch_size, plan.seed)
        rate = learning_rate(plan, before.step, self.total_steps)
        # Divided by what the whole step learns, so that packing does not change the mathematics.
        learnt = sum(part.learnt for i in indices for part in data.sequences(self._examples[i]))
        normaliser = len(indices) if plan.method == "dpo" else learnt
        totals = Totals()
        with seeded(order.step_seed(before.step, plan.seed), self._device):
            for batch in self._batches(self._examples, indices):
                sums = self._objective(batch, "train")
                (sums.loss / normaliser).backward()
                totals.add(sums, batch)
        norm = self._optimizer.step(rate)
        skipped = 0 if math.isfinite(norm) else before.skipped_in_a_row + 1
        if skipped:
            _log.warning("step %d: the gradient's norm is %s, nothing is changed", before.step + 1, norm)
        if skipped >= MAX_SKIPPED:
            raise DivergedError(
                f"the gradient was not finite in {skipped} steps in a row (up to step {before.step + 1}): "
                "lower the learning rate, or look for damaged weights or examples"
            )
        train = totals.means(normaliser)
        step = before.step + 1
        due = step % plan.checkpoint_every == 0 or step == self.total_steps
        valid = self._validate() if due and self._validation else None
        report = StepReport(
            step=step,
            total_steps=self.total_steps,
            train_loss=train.loss,
            train_mean_token_accuracy=train.accuracy,
            valid_loss=None if valid is None else valid.loss,
            valid_mean_token_accuracy=None if valid is None else valid.accuracy,
            learning_rate=rate,
            tokens=totals.tokens,
            seconds=time.monotonic() - begin,
            checkpoint=None,
            train_reward_accuracy=train.ranked,
        )
        progress = Progress(step, before.trained_tokens + totals.tokens, skipped, report)
        if due:
            progress = replace(progress, report=replace(report, checkpoint=self._save(progress)))
        return progress

    def _validate(self) -> Means:
        totals = Totals()
        with self._model.evaluating():
            for batch in self._batches(self._validation, range(len(self._validation))):
                totals.add(self._objective(batch, "validation"), batch)
        return totals.means(len(self._validation) if self._plan.method == "dpo" else totals.counted)

    def _objective(self, batch: PackedBatch, which: str) -> Sums:
        if self._references is None:
            return objectives.supervised(self._model, batch)
        return objectives.dpo(self._model, batch, self._references.of(which, batch), self._plan.dpo_beta)

    def _batches(self, examples: data.TrainingData, indices: Sequence[int]) -> Iterator[PackedBatch]:
        for packed in packing.pack(examples, indices, self._plan.micro_batch_tokens):
            batch = packing.build(examples, packed, self._device)
            self._trying = f"{batch.tokens} tokens at once (the longest sequence has {batch.max_length})"
            yield batch

    def _save(self, progress: Progress) -> Path:
        def servable(folder: Path) -> None:
            if self._model.adapter is not None:
                self._model.save_adapter(folder)

        return self._checkpoints.write(progress, self._optimizer.state_tensors(), servable)


@contextmanager
def _of_validation() -> Iterator[None]:
    """Marks ExampleErrors from inside."""
    try:
        yield
    except ExampleError as error:
        error.in_validation = True
        raise


@contextmanager
def _only_process(lock: Path) -> Iterator[None]:
    """The lock ends with the process that holds it, however that ends."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"another process trains in {lock.parent}") from None
        yield


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """On a GPU, cuBLAS also wants CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment; torch says so itself."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wanted or before)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
