"""What crosses the border between API process and training process: msgspec, over one unnamed socket pair. No pickle.

Every frame is four bytes of length (big-endian), then one msgpack message.
"""

from typing import Literal

import msgspec

from server.training.calls import Compute, Create, OptimStep

MAX_FRAME_BYTES = 2**30

FailureKind = Literal["invalid", "weights", "diverged", "memory", "storage", "internal"]


class Arguments(msgspec.Struct, frozen=True):
    """What the process is told when it starts."""

    model: str
    device: str  # auto, cpu or cuda
    cache_dir: str | None
    model_image_dir: str | None
    max_length: int | None
    max_model_len: int | None  # the engine's; None: as many as the model has positions
    micro_batch_tokens: int
    parent_pid: int
    log_level: int
    answering_fd: int | None = None  # inherited; None: training never rests
    gpu_share: float = 1.0


class Save(msgspec.Struct, frozen=True, tag=True):
    folder: str
    optimizer: bool
    files: dict[str, str]  # texts to put beside the weights
    beside: bool = False  # what stands now, whatever the process computes meanwhile


class Load(msgspec.Struct, frozen=True, tag=True):
    folder: str
    optimizer: bool


class Remove(msgspec.Struct, frozen=True, tag=True):
    pass


Work = Create | Compute | OptimStep | Save | Load | Remove


class Command(msgspec.Struct, frozen=True):
    command_id: int
    model_id: str
    work: Work


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Sent every second: the process lives."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Sent once, when the base model is loaded."""

    device: str
    max_length: int
    vocab_size: int


class Unable(msgspec.Struct, frozen=True, tag=True):
    """The base model cannot be trained here; the process ends."""

    message: str


class Done(msgspec.Struct, frozen=True, tag=True):
    """The work is done: what came of it, where it fits."""

    command_id: int
    parameters: int = 0  # Create
    loss: float = 0.0  # Compute, and so on to `logprobs`
    tokens: int = 0
    clipped: int | None = None
    logprobs: tuple[bytes, ...] = ()
    grad_norm: float = 0.0  # OptimStep
    steps: int = 0  # of optimiser behind the weights now


class Failed(msgspec.Struct, frozen=True, tag=True):
    command_id: int
    kind: FailureKind
    message: str


FromWorker = Beat | Ready | Unable | Done | Failed

_command = msgspec.msgpack.Decoder(Command)
_from_worker = msgspec.msgpack.Decoder(FromWorker)


def command(body: bytes) -> Command:
    return _command.decode(body)


def from_worker(body: bytes) -> FromWorker:
    return _from_worker.decode(body)
