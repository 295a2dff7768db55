"""The training process from first to last line: one base model, commands in their turns. Started by child.Child.
The only file of the room that touches tensors; logs carry no token."""

import contextlib
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec

from models.errors import ModelLoadError
from models.training import (
    AdamParams,
    CheckpointError,
    ClipRange,
    Datum,
    DivergedError,
    ExampleError,
    LoraSettings,
    OutOfMemoryError,
    Pacer,
    PlanError,
    SessionSettings,
    TrainingSession,
)
from server.answering import SignReader
from server.engine.parent import die_with_parent
from server.log import begin_log
from server.training.calls import Compute, Create, OptimStep, PackedDatum
from server.training.link import WorkerLink
from server.training.messages import (
    Arguments,
    Command,
    Done,
    Failed,
    FailureKind,
    Load,
    Ready,
    Remove,
    Save,
    Unable,
)
from server.training.turns import take_turns

logger = logging.getLogger("server.training.worker")  # __name__ is "__main__" in the process itself

NICENESS = 10
OOM_SCORE = 500  # of 1000: taken first when memory ends
SPARE_BYTES = 512 * 2**20  # of a GPU, left to the engine, which asks for little things in the middle of answers

KINDS: tuple[tuple[tuple[type[Exception], ...], FailureKind], ...] = (
    ((PlanError, ExampleError), "invalid"),
    ((DivergedError,), "diverged"),
    ((OutOfMemoryError, MemoryError), "memory"),
)


def load(arguments: Arguments) -> TrainingSession:
    """Raises ModelLoadError, PlanError, OutOfMemoryError and what else loading a model raises."""
    import torch

    from models import descriptions, registry
    from models.training.out_of_memory import enough_memory, leave_spare

    cache, image = arguments.cache_dir, arguments.model_image_dir
    source = registry.resolve(
        arguments.model,
        cache_dir=None if cache is None else Path(cache),
        image_dir=None if image is None else Path(image),
    )
    positions = descriptions.max_positions(source)
    settings = SessionSettings(
        model=arguments.model,
        max_length=min(positions, arguments.max_length or positions),
        micro_batch_tokens=arguments.micro_batch_tokens,
        max_model_len=arguments.max_model_len,
    )
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(auto if arguments.device == "auto" else arguments.device)
    with enough_memory(f"{device} has too little memory for the base model beside what else is in it"):
        leave_spare(device, SPARE_BYTES)
        return TrainingSession(source, settings, device, pacer=_pacer(arguments))


def _pacer(arguments: Arguments) -> Pacer | None:
    if arguments.answering_fd is None or arguments.gpu_share >= 1:
        return None
    return Pacer(SignReader(arguments.answering_fd).is_up, arguments.gpu_share)


def answer(session: TrainingSession, command: Command) -> Done | Failed:
    """Raises what leaves the process unfit to go on."""
    import torch

    from models.training.out_of_memory import enough_memory

    try:
        with enough_memory("the server has too little memory for this call"):
            return carry_out(session, command)
    except torch.AcceleratorError:
        raise  # every later call would fail, too
    except Exception as error:
        kind, message = _failure(error, command)
        return Failed(command.command_id, kind, message)


def carry_out(session: TrainingSession, command: Command) -> Done:
    number, model, work = command.command_id, command.model_id, command.work
    match work:
        case Create():
            lora = LoraSettings(rank=work.rank, alpha=work.alpha, target_modules=work.target_modules)
            return Done(number, parameters=session.create(model, lora, work.seed))
        case Compute():
            compute = session.forward_backward if work.backward else session.forward
            data = [_datum(packed) for packed in work.data]
            report = compute(model, data, work.loss_fn, ClipRange(work.clip_low, work.clip_high))
            return Done(
                number,
                loss=report.loss,
                tokens=report.tokens,
                clipped=report.clipped,
                logprobs=tuple(values.numpy().astype("<f4").tobytes() for values in report.logprobs),
                steps=session.steps(model),
            )
        case OptimStep():
            params = AdamParams(**msgspec.structs.asdict(work))
            return Done(number, grad_norm=session.optim_step(model, params), steps=session.steps(model))
        case Save():
            session.save(model, Path(work.folder), optimizer=work.optimizer, files=work.files)
        case Load():
            session.load(model, Path(work.folder), optimizer=work.optimizer)
        case Remove():
            session.remove(model)
            return Done(number)
    return Done(number, steps=session.steps(model))


def _datum(packed: PackedDatum) -> Datum:
    import numpy
    import torch

    def read(data: bytes | None, kind: str) -> Any:
        if data is None:
            return None
        values = torch.from_numpy(numpy.frombuffer(data, kind).copy())
        return values.long() if kind == "<i4" else values

    return Datum(
        tokens=read(packed.tokens, "<i4"),
        targets=read(packed.targets, "<i4"),
        weights=read(packed.weights, "<f4"),
        logprobs=read(packed.logprobs, "<f4"),
        advantages=read(packed.advantages, "<f4"),
    )


def _failure(error: Exception, command: Command) -> tuple[FailureKind, str]:
    """For the model's owner: no paths and no details of ours. The log has the rest."""
    if isinstance(error, CheckpointError) and isinstance(command.work, Save):
        logger.error("weights were not saved: %s", error)
        return "storage", "the weights could not be written: the server's disk is full, or cannot be used"
    if isinstance(error, CheckpointError):
        return "weights", f"the weights cannot be loaded: {error}"
    for kinds, kind in KINDS:
        if isinstance(error, kinds):
            return kind, str(error) or "the server has too little memory for this call"
    logger.error("a call failed", exc_info=error)
    return "internal", f"the training process failed at this call ({type(error).__name__})"


def serve(arguments: Arguments, link: WorkerLink) -> None:
    from models.patching import UnsupportedModelError

    try:
        session = load(arguments)
    except (UnsupportedModelError, PlanError) as error:
        link.send(Unable(f"The base model cannot be trained on this server: {error}"))
        return
    except ModelLoadError as error:  # the message may name a path
        logger.error("the base model cannot be loaded: %s", error)
        link.send(Unable("The base model cannot be loaded for training"))
        return
    except OutOfMemoryError as error:
        logger.error("the base model does not fit", exc_info=error)
        link.send(Unable(f"The base model cannot be loaded for training: {error}"))
        return
    link.send(Ready(str(session.device), session.settings.max_length, session.vocab_size))
    take_turns(link, lambda command: answer(session, command))


def yield_to_the_server() -> None:
    """The processor and, on Linux, memory: weights can be saved, answers of a killed engine are lost."""
    os.nice(NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))


def main() -> None:
    connected = socket.socket(fileno=int(sys.argv[1]))
    arguments = msgspec.json.decode(sys.argv[2], type=Arguments)
    die_with_parent(arguments.parent_pid)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to the group: the API process drains, ends us
        signal.signal(number, signal.SIG_IGN)
    begin_log(arguments.log_level, "training")
    yield_to_the_server()
    link = WorkerLink(connected)
    status = 0
    try:
        serve(arguments, link)
    except Exception:
        logger.critical("the training process ends", exc_info=True)
        status = 1
    link.close()
    logging.shutdown()
    os._exit(status)  # a lost device may hang or crash in destructors, and there is nothing left to tidy


if __name__ == "__main__":
    main()
