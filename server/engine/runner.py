"""What the engine asks of whoever runs a step: models.runner.ModelRunner in production, a fake in tests. Knows no
requests: a slot is a row number."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Protocol, cast

from models.batch import AdapterFacts, SamplingParams, StepBatch, StepOutput
from models.shared_runs import SharingLimits
from models.stages import Stages
from server.engine.config import EngineConfig
from server.engine.offload import HostMemory
from server.engine.tpot_target import TpotTarget


class AdapterSlots(Protocol):
    """models.adapters.AdapterSlots: adapters are read under numbers, and copied into slots between two steps."""

    def read(self, adapter_id: int, folder: str, within: str | None = None) -> AdapterFacts:
        """In another thread. Raises models.errors.AdapterError."""
        ...

    def place(self, adapter_id: int, slot: int) -> None: ...

    def drop(self, adapter_id: int) -> None: ...


class LaunchedStep(Protocol):
    def collect(self) -> StepOutput:
        """Waits for the step. Once, in the order of the launches."""
        ...

    def is_done(self) -> bool:
        """Whether collect() would not wait."""
        ...


class Runner(Protocol):
    """Slots are added before the first launch that names them and removed after the last one. A preempted request comes
    back in a new slot: with its prompt, and with append_known() for what it had generated."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def kernels(self) -> dict[str, str]: ...

    @property
    def adapters(self) -> AdapterSlots | None: ...

    @property
    def sharing_limits(self) -> SharingLimits | None:
        """When steps are to name shared prefixes; None: it does not pay here."""
        ...

    def warm_up(self, *, all_graphs: bool = True) -> None: ...

    def add_request(self, slot: int, sampling: SamplingParams, prompt_token_ids: Sequence[int]) -> None: ...

    def append_known(self, slot: int, token_ids: Sequence[int]) -> None: ...

    def remove_request(self, slot: int) -> None: ...

    def launch(self, batch: StepBatch) -> LaunchedStep:
        """Hands the step to the device and, where that is another one than this CPU, waits for nothing. A token id of
        models.batch.IN_FLIGHT is the one that the step launched before samples for the slot."""
        ...


class CannotServeError(Exception):
    """The configuration or the model is wrong, and the message is all that the person who started us needs."""


def _nothing() -> None:
    pass


def _nothing_left() -> bool:
    return False


def _no_pages(count: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class LoadedRunner:
    """A runner, what the API process needs to know of its model, and how its failures are told apart."""

    runner: Runner
    model: str
    device: str
    dtype: str
    max_model_len: int
    max_num_batched_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    sampling_defaults: dict[str, float] = field(default_factory=dict)  # by the model's files
    tpot_target: TpotTarget | None = None  # None: steps are limited in tokens only
    overlaps: bool = False  # a step is launched while the one before runs: worth it where the device is not this CPU
    out_of_memory: tuple[type[BaseException], ...] = (MemoryError,)
    probe: Callable[[], None] = _nothing  # raises when the device can not be used any more
    free_memory: Callable[[], None] = _nothing  # gives cached memory back before a retry
    fill_blocks: Callable[[int], None] = _no_pages  # random keys and values in the first so many, to rehearse with
    prepare: Callable[[], bool] = _nothing_left  # of later steps, one thing at a time (0.1 s); False: nothing now
    missing_graphs: Callable[[], int] = int  # for which there was no memory
    kernel_calls: Callable[[], dict[str, int]] = dict
    host_memory: HostMemory | None = None  # for blocks that the device gives up
    fingerprint: Callable[[], bytes] = bytes  # of what keys and values depend on besides tokens: 32 bytes


def load(config: EngineConfig, stages: Stages) -> LoadedRunner:
    """Calls the factory that the configuration names."""
    module, _, function = config.runner.partition(":")
    factory = cast(Callable[[EngineConfig, Stages], LoadedRunner], getattr(import_module(module), function))
    return factory(config, stages)
