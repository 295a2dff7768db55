"""The trainer process from first to last line: one stage of one job, then it ends. Started by process.TrainerProcess.
The only file of the room that runs models.training's Trainer; logs carry no text of the data."""

import contextlib
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from models.training import ExampleError, Outcome, Pacer, StepReport, TrainingPlan, Verdict
from models.training.size import check_size
from models.unused_packages import leave_out_torch
from server.answering import SignReader
from server.engine.parent import die_with_parent
from server.finetune.dataset import Dataset, read_dataset
from server.finetune.folders import TRAINING, VALIDATION, JobFolder
from server.finetune.last_words import last_word
from server.finetune.link import TrainerLink
from server.finetune.messages import Arguments, Busy, Finished, LastWord, Started, Stepped, Stopped, Validated
from server.log import begin_log
from server.text.tokenizer import TextTokenizer

NICENESS = 10  # of 19: answers come before training
OOM_SCORE = 900  # of 1000: where memory ends, the trainer goes and not the engine
SPARE_BYTES = 512 * 2**20  # of a GPU: what the engine asks for in the middle of answers is small, and must be there


class Trains(Protocol):
    """What is needed of models.training.Trainer."""

    def run(self, on_step: Callable[[StepReport], Verdict]) -> Outcome: ...


MakeTrainer = Callable[..., Trains]


def serve(arguments: Arguments, link: TrainerLink, make_trainer: MakeTrainer) -> LastWord:
    """The process's last word."""
    folder = JobFolder(Path(arguments.folder))
    try:
        with folder.alone() as alone:
            if not alone:
                return Busy()
            # Not while files are validated only: by the time of training, the server may have another limit.
            if arguments.max_full_parameters is not None:
                check_size(model_source(arguments), arguments.max_full_parameters)
            if arguments.stage == "validate":
                return _validate(arguments, folder)
            return _train(arguments, folder, link, make_trainer)
    except Exception as error:
        return last_word(error, answering=_is_answering(arguments))


def _validate(arguments: Arguments, folder: JobFolder) -> Validated:
    training, validation = read_datasets(arguments, folder, arguments.max_length)
    longest = max(training.longest, 0 if validation is None else validation.longest)
    checked = 0 if validation is None else len(validation.examples)
    return Validated(len(training.examples), checked, training.tokens, longest)


def _train(arguments: Arguments, folder: JobFolder, link: TrainerLink, make_trainer: MakeTrainer) -> Finished | Stopped:
    assert arguments.plan is not None
    plan = TrainingPlan.from_json(arguments.plan)
    # Not the server's limit of today: the files were validated, perhaps under another.
    training, validation = read_datasets(arguments, folder, plan.max_length)
    try:
        trainer = make_trainer(
            plan,
            training.examples,
            None if validation is None else validation.examples,
            folder.run,
            None if arguments.device == "auto" else arguments.device,
            source=model_source(arguments),
            pacer=_pacer(arguments, link),
            spare_bytes=SPARE_BYTES,
            chat_template=folder.template().source,
        )
        link.send(Started(_device_name(arguments.device)))
        outcome = trainer.run(lambda report: Verdict.PAUSE if link.step(_stepped(report)) else Verdict.CONTINUE)
    except ExampleError as error:
        if validation is not None and error.in_validation:
            raise validation.refusal(error, VALIDATION) from error
        raise training.refusal(error, TRAINING) from error
    if not outcome.finished or outcome.result is None:
        return Stopped()
    return Finished(outcome.trained_tokens, str(outcome.result))


def _pacer(arguments: Arguments, link: TrainerLink) -> Pacer | None:
    """Who is told to stop rests no more: the step that is under way ends as soon as it can."""
    if arguments.answering_fd is None or arguments.gpu_share >= 1:
        return None
    sign = SignReader(arguments.answering_fd)
    return Pacer(lambda: sign.is_up() and not link.stopping, arguments.gpu_share)


def _is_answering(arguments: Arguments) -> bool:
    return arguments.answering_fd is not None and SignReader(arguments.answering_fd).is_up()


def _device_name(device: str) -> str:
    if device == "cpu":
        return "cpu"
    import torch

    return torch.cuda.get_device_name() if device == "cuda" or torch.cuda.is_available() else "cpu"


def read_datasets(arguments: Arguments, folder: JobFolder, max_length: int | None) -> tuple[Dataset, Dataset | None]:
    """Of examples of up to `max_length` tokens; None: as many as the model has positions."""
    from models import descriptions

    source = model_source(arguments)
    tokenizer = TextTokenizer(descriptions.load_tokenizer(source), folder.template())
    positions = descriptions.max_positions(source)
    longest = min(positions, max_length or positions)
    training = read_dataset(folder.dataset(TRAINING), tokenizer, longest, TRAINING)
    if not arguments.validation:
        return training, None
    return training, read_dataset(folder.dataset(VALIDATION), tokenizer, longest, VALIDATION)


def model_source(arguments: Arguments) -> Any:
    """Where the base model is on this server, today."""
    from models import registry

    cache, image = arguments.cache_dir, arguments.model_image_dir
    return registry.resolve(
        arguments.model,
        cache_dir=None if cache is None else Path(cache),
        image_dir=None if image is None else Path(image),
    )


def _stepped(report: StepReport) -> Stepped:
    return Stepped(
        step=report.step,
        total_steps=report.total_steps,
        train_loss=_finite(report.train_loss),
        train_mean_token_accuracy=_finite(report.train_mean_token_accuracy),
        valid_loss=_finite(report.valid_loss),
        valid_mean_token_accuracy=_finite(report.valid_mean_token_accuracy),
        learning_rate=report.learning_rate,
        tokens=report.tokens,
        seconds=report.seconds,
        checkpoint=report.checkpoint is not None,
    )


def _finite(value: float | None) -> float | None:
    """JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None


def yield_to_the_server() -> None:
    """The processor and, on Linux, memory: a killed trainer goes on from a checkpoint, an engine loses answers."""
    os.nice(NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))


def real_trainer(*arguments: Any, **options: Any) -> Trains:
    from models.training import Trainer

    return Trainer(*arguments, **options)


def main(make_trainer: MakeTrainer = real_trainer) -> None:
    connected = socket.socket(fileno=int(sys.argv[1]))
    arguments = msgspec.json.decode(sys.argv[2], type=Arguments)
    die_with_parent(arguments.parent_pid)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to the group: the API process drains, tells us
        signal.signal(number, signal.SIG_IGN)
    begin_log(arguments.log_level, "trainer")
    yield_to_the_server()
    if arguments.stage == "validate":
        leave_out_torch()
    link = TrainerLink(connected)
    link.send(serve(arguments, link, make_trainer))
    link.close()
    logging.shutdown()
    os._exit(0)  # a lost device may hang or crash in destructors, and there is nothing left to tidy


if __name__ == "__main__":
    main()
