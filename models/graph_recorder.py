"""Steps as CUDA graphs: the model and the choice of tokens, recorded and replayed. Knows no other graph than the one it
is given.

What differs from step to step lies at fixed addresses: one buffer that is copied before each replay, the slots' block
tables and the tokens sampled last. Lengths are read on the device, so graphs that were recorded short are right when
long.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import attention_backend
from attention_backend import dispatch
from models.adapters import AdapterSlots
from models.graph_fields import StepFields, num_bytes, step_tensors
from models.host_waits import refusing_waits
from models.inputs import StepInputs, StepTensors
from models.recorded_groups import RecordedGroups
from models.shared_runs import Levels
from models.step_rows import StepArrays, StepRows
from models.step_shapes import GraphKey, StepShape

#: Logits of a step: of every row, or of its sample_rows.
Forward = Callable[[StepTensors, bool], Tensor]


@dataclass(frozen=True, slots=True)
class GraphOutput:
    """Of a replay's samples; valid until the next one."""

    logits: Tensor  # [n, vocab]
    token_ids: Tensor  # int64 [n]
    finite: Tensor  # bool [n]
    slots: Tensor  # int64 [n]

    def first(self, count: int) -> "GraphOutput":
        return GraphOutput(self.logits[:count], self.token_ids[:count], self.finite[:count], self.slots[:count])


@dataclass(frozen=True, slots=True)
class _Staging:
    """A pinned buffer, and when it may be written again."""

    buffer: Tensor
    copied: torch.cuda.Event


@dataclass(frozen=True, slots=True)
class StepGraph:
    """One recorded step."""

    graph: torch.cuda.CUDAGraph
    output: GraphOutput
    shared: RecordedGroups | None
    calls: Counter[str]  # of attention kernels


class GraphRecorder:
    """All graphs that it records share one pool of memory, one buffer of inputs and one of logits."""

    def __init__(
        self,
        forward: Forward,
        inputs: StepInputs,
        shapes: Sequence[StepShape],
        *,
        max_model_len: int,
        device: torch.device,
        adapters: AdapterSlots | None,
    ) -> None:
        """`shapes`: all that will ever be recorded."""
        self._forward = forward
        self._inputs = inputs
        self._max_model_len = max_model_len
        self._device = device
        self._adapters = adapters
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._most_samples = max(shape.samples for shape in shapes)
        most = max(map(num_bytes, shapes))
        self._buffer = torch.zeros(most, dtype=torch.uint8, device=device)
        self._stagings = [
            _Staging(torch.zeros(most, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()) for _ in range(2)
        ]
        self._turn = 0
        self._stream = torch.cuda.Stream(device)
        self._logits: Tensor | None = None  # of every graph: [most samples, vocab]
        self._waits_for_nothing = False  # a step; known before the first is recorded

    def record(self, key: GraphKey) -> StepGraph:
        """Raises torch.OutOfMemoryError, and HostWaitsError for a model of whose steps none can be recorded."""
        if key.adapted:
            return self._record_adapted(key.shape)
        if self._adapters is not None:
            self._adapters.select(None, 0)
        shared = RecordedGroups(self._inputs, key.shape.decodes, key.levels, self._device) if key.levels else None
        return self._capture(key.shape, shared)

    def drop(self) -> None:
        """Once no graph is left."""
        self._logits = self._pool = None

    def replay(
        self,
        graph: StepGraph,
        shape: StepShape,
        levels: Levels,
        arrays: StepArrays,
        rows: StepRows,
        temperature: np.ndarray,
        keys: np.ndarray,
    ) -> GraphOutput:
        """One step, in a graph of this shape. The tables are up to date; temperature float32 `[n]` and keys int32
        `[n, 2]` are the sampler's, for each row that is sampled."""
        staging = self._stagings[self._turn]
        self._turn = 1 - self._turn
        staging.copied.synchronize()  # of the step before the last: a wait only where steps that sample nothing follow
        fields = StepFields.of(staging.buffer, shape)
        fields.fill(shape, arrays, rows, temperature, keys, padding_slot=self._inputs.tables.padding_slot)
        self._copy(staging, shape)
        if graph.shared is not None:
            graph.shared.write(levels)
        graph.graph.replay()
        dispatch.replayed(graph.calls)
        return graph.output.first(len(arrays.sample_rows))

    def _record_adapted(self, shape: StepShape) -> StepGraph:
        assert self._adapters is not None
        with self._adapters.rehearsing():  # every layer may have an adapter one day
            graph = self._capture(shape, adapted=True)
        self._adapters.select(None, 0)
        return graph

    def _capture(self, shape: StepShape, shared: RecordedGroups | None = None, *, adapted: bool = False) -> StepGraph:
        self._stage_padding(shape)
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(stream):
                self._run(shape, shared, adapted)  # compiles kernels and chooses algorithms: neither can be recorded
                if not self._waits_for_nothing:  # a recording that fails would leave torch's allocator in disorder
                    with refusing_waits():
                        self._run(shape, shared, adapted)
                    self._waits_for_nothing = True
        finally:
            torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with (
            _no_collection(),
            dispatch.recording() as calls,
            _recorded(graph, self._pool, stream),
        ):
            output = self._run(shape, shared, adapted)
        return StepGraph(graph, output, shared, calls)

    def _run(self, shape: StepShape, shared: RecordedGroups | None, adapted: bool) -> GraphOutput:
        fields = StepFields.of(self._buffer, shape)
        if adapted and self._adapters is not None:
            self._adapters.select(fields.adapter_rows, self._adapters.limits.max_loras)
        step = step_tensors(fields, shape, self._inputs, max_model_len=self._max_model_len)
        if shared is not None:
            step = shared.shared_by(step)
        logits = self._forward(step, shape.only_decodes)
        if self._logits is None:
            self._logits = logits.new_empty(self._most_samples, logits.shape[1])
        kept = self._logits[: shape.samples]
        kept.copy_(logits)
        token_ids, finite = attention_backend.choose_tokens(kept, fields.temperature, fields.keys)
        return GraphOutput(kept, token_ids, finite, step.sample_slots_on_device)

    def _stage_padding(self, shape: StepShape) -> None:
        nothing = np.empty(0, np.int64)
        rows = StepRows(nothing, nothing, nothing, nothing.astype(bool), nothing, nothing, nothing)
        arrays = StepArrays(nothing, nothing, nothing, nothing, nothing, nothing)
        staging = self._stagings[0]
        staging.copied.synchronize()
        StepFields.of(staging.buffer, shape).fill(
            shape, arrays, rows, np.empty(0, np.float32), np.empty((0, 2), np.int32),
            padding_slot=self._inputs.tables.padding_slot,
        )  # fmt: skip
        self._copy(staging, shape)

    def _copy(self, staging: _Staging, shape: StepShape) -> None:
        used = num_bytes(shape)
        self._buffer[:used].copy_(staging.buffer[:used], non_blocking=True)
        staging.copied.record(torch.cuda.current_stream(self._device))


@contextmanager
def _recorded(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """As torch.cuda.graph, which gives up torch's pinned memory too: to have it again, steps would wait for the GPU."""
    torch.cuda.synchronize(stream.device)
    torch.cuda.empty_cache()  # a graph's memory is of no use to others, nor theirs to it
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()


@contextmanager
def _no_collection() -> Iterator[None]:
    """What the garbage collector frees while a graph is recorded (an older graph, a pinned buffer) would spoil it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
