"""What crosses the border between API process and trainer process: msgspec, over one unnamed socket pair. No pickle.

Every frame is four bytes of length (big-endian), then one msgpack message.
"""

import msgspec

MAX_FRAME_BYTES = 2**20


class Arguments(msgspec.Struct, frozen=True):
    """What a trainer process is told when it starts: one stage of one job."""

    stage: str  # "validate" or "train"
    model: str
    method: str
    folder: str  # of the job
    device: str  # auto, cpu or cuda
    cache_dir: str | None
    model_image_dir: str | None
    max_length: int | None  # tokens an example may have; None: as many as the model has positions
    plan: str | None  # of a job that is validated
    validation: bool  # whether there is a validation file
    parent_pid: int
    log_level: int
    answering_fd: int | None = None  # inherited; None: training never rests
    gpu_share: float = 1.0
    max_full_parameters: int | None = None  # of a model all of whose weights are to learn; None: an adapter's job


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Sent every second: the process lives."""


class Validated(msgspec.Struct, frozen=True, tag=True):
    examples: int
    validation_examples: int
    tokens: int  # of all training examples
    longest: int  # tokens of the longest sequence, validation included


class Started(msgspec.Struct, frozen=True, tag=True):
    device: str


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """Answered by Recorded. At most one step is trained before the answer has come."""

    step: int
    total_steps: int
    train_loss: float | None
    train_mean_token_accuracy: float | None
    valid_loss: float | None
    valid_mean_token_accuracy: float | None
    learning_rate: float
    tokens: int
    seconds: float
    checkpoint: bool


class Finished(msgspec.Struct, frozen=True, tag=True):
    trained_tokens: int
    result: str  # the folder


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """As told, with a checkpoint."""


class Busy(msgspec.Struct, frozen=True, tag=True):
    """Another trainer process, which lost its lease and was not killed yet, still works on the job."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The job can never succeed."""

    code: str
    message: str
    param: str | None = None


class Crashed(msgspec.Struct, frozen=True, tag=True):
    """Something went wrong that may go right the next time."""

    reason: str


class NoRoom(msgspec.Struct, frozen=True, tag=True):
    """The disk is full, or memory is."""

    reason: str
    on_disk: bool
    answering: bool = False  # whether requests were open, which need memory, too


class Recorded(msgspec.Struct, frozen=True, tag=True):
    pass


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Write a checkpoint and end."""


FromTrainer = Beat | Validated | Started | Stepped | Finished | Stopped | Busy | Refused | Crashed | NoRoom
ToTrainer = Recorded | Stop
LastWord = Validated | Finished | Stopped | Busy | Refused | Crashed | NoRoom

_from_trainer = msgspec.msgpack.Decoder(FromTrainer)
_to_trainer = msgspec.msgpack.Decoder(ToTrainer)


def from_trainer(body: bytes) -> FromTrainer:
    return _from_trainer.decode(body)


def to_trainer(body: bytes) -> ToTrainer:
    return _to_trainer.decode(body)
