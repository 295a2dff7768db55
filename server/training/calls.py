"""What a caller asks of a model, and what comes of it: msgspec, so that a call has one digest and can cross a border.

Numbers of tokens travel as packed arrays: int32 and float32, little-endian. Knows no HTTP and no order of calls.
"""

import hashlib
from typing import Literal

import msgspec

from models.training import LossName
from server.engine.token_ids import TokenIds

Kind = Literal["weights", "sampler_weights"]


class PackedDatum(msgspec.Struct, frozen=True):
    tokens: bytes
    targets: bytes
    weights: bytes | None = None
    logprobs: bytes | None = None
    advantages: bytes | None = None


class NewModel(msgspec.Struct, frozen=True):
    """What a caller says of a model before it is one."""

    rank: int | None  # None: the server's default
    alpha: int
    target_modules: tuple[str, ...] | None
    seed: int


class Create(msgspec.Struct, frozen=True, tag=True):
    rank: int
    alpha: int
    target_modules: tuple[str, ...] | None
    seed: int


class Compute(msgspec.Struct, frozen=True, tag=True):
    """forward_backward, or forward alone."""

    data: tuple[PackedDatum, ...]
    loss_fn: LossName
    backward: bool
    clip_low: float
    clip_high: float

    @property
    def num_tokens(self) -> int:
        return sum(len(datum.tokens) for datum in self.data) // 4


class OptimStep(msgspec.Struct, frozen=True, tag=True):
    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float


class SaveWeights(msgspec.Struct, frozen=True, tag=True):
    name: str
    kind: Kind
    serve: bool
    overwrite: bool


class LoadWeights(msgspec.Struct, frozen=True, tag=True):
    path: str
    optimizer: bool


class Sample(msgspec.Struct, frozen=True, tag=True):
    prompt: TokenIds
    num_samples: int
    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]


class Unload(msgspec.Struct, frozen=True, tag=True):
    pass


Call = Create | Compute | OptimStep | SaveWeights | LoadWeights | Sample | Unload


class Created(msgspec.Struct, frozen=True, tag=True):
    model_id: str
    parameters: int  # that learn


class Computed(msgspec.Struct, frozen=True, tag=True):
    loss: float  # the sum
    tokens: int
    clipped: int | None
    logprobs: tuple[bytes, ...]  # float32, of each datum's targets


class Stepped(msgspec.Struct, frozen=True, tag=True):
    grad_norm: float  # before clipping
    steps: int  # so far


class Saved(msgspec.Struct, frozen=True, tag=True):
    path: str
    kind: Kind
    steps: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    path: str
    steps: int


class SampledSequence(msgspec.Struct, frozen=True):
    tokens: tuple[int, ...]  # the one that stopped it included
    logprobs: tuple[float, ...]  # of the model's own distribution
    stop_reason: Literal["stop", "length"]


class Sampled(msgspec.Struct, frozen=True, tag=True):
    sequences: tuple[SampledSequence, ...]


class Unloaded(msgspec.Struct, frozen=True, tag=True):
    model_id: str


Outcome = Created | Computed | Stepped | Saved | Loaded | Sampled | Unloaded

_encoder = msgspec.msgpack.Encoder(enc_hook=memoryview)  # of TokenIds


def digest(call: Call) -> bytes:
    """Equal for equal calls only."""
    return hashlib.sha256(_encoder.encode(call)).digest()
