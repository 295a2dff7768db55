"""Steps as CUDA graphs: the model and the choice of tokens, recorded once per shape of a step and replayed.

A step runs in the smallest graph that it fits. What differs from step to step lies at fixed addresses: one buffer that
is copied before each replay, the slots' block tables and the tokens sampled last. Lengths are read on the device, so
graphs that were recorded short are right when long. Decodes that share pages have graphs of their own, in which one
pass reads those pages for all of them.
"""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import attention_backend
from models.adapters import AdapterSlots
from models.batch import NO_ADAPTER, StepBatch
from models.copies import to_device
from models.graph_fields import StepFields, num_bytes, step_tensors
from models.inputs import StepInputs, StepTensors
from models.prefix_groups import GroupArrays, shared_pages
from models.shared_runs import Levels
from models.step_rows import StepArrays, StepRows
from models.step_shapes import StepNeeds, StepShape

logger = logging.getLogger(__name__)

#: Rows of a prompt that take longer to compute over shared keys than these take to read.
MANY_ROWS = 32
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


@dataclass(slots=True)
class _Groups:
    """The shared pages of a graph: `GroupArrays` of one level at a fixed address."""

    groups: Tensor  # int32 [1, NUM_FIELDS, rows + 1]
    own_starts: Tensor  # int32 [rows]
    max_rows: int
    written: GroupArrays | None = None  # what is there


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    output: GraphOutput
    shared: _Groups | None


class StepGraphs:
    """Graphs of a runner's steps. One is recorded when a step first wants it, unless it was in a quiet moment before;
    those of decodes with adapters are never recorded earlier."""

    def __init__(
        self,
        forward: Forward,
        inputs: StepInputs,
        shapes: Sequence[StepShape],
        *,
        max_model_len: int,
        with_sharing: bool,
        device: torch.device,
        adapters: AdapterSlots | None = None,
    ) -> None:
        """`with_sharing`: whether decodes may name shared pages, on one level."""
        self._forward = forward
        self._inputs = inputs
        self._shapes = sorted(shapes)
        self._max_model_len = max_model_len
        self._device = device
        most_decodes = max(shape.decodes for shape in self._shapes)
        #: Where pages that decodes share are read once: beside prompts, one graph a number of rows has to do.
        self._for_sharing = {
            shape
            for shape in self._shapes
            if with_sharing
            and shape.decodes > 1
            and (shape.only_decodes or shape.decodes == min(most_decodes, shape.rows))
        }
        self._plain: dict[StepShape, _Graph] = {}
        self._sharing: dict[StepShape, _Graph] = {}
        self._adapted: dict[StepShape, _Graph] = {}
        self._adapters = adapters
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._without: set[tuple[StepShape, bool, bool]] = set()  # shapes for which there was no memory
        most = max(map(num_bytes, self._shapes))
        self._buffer = torch.zeros(most, dtype=torch.uint8, device=device)
        self._stagings = [
            _Staging(torch.zeros(most, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()) for _ in range(2)
        ]
        self._turn = 0
        self._stream = torch.cuda.Stream(device)
        self._logits: Tensor | None = None  # of every graph: [most samples, vocab]

    def capture(self, shapes: Sequence[StepShape] | None = None) -> None:
        """Records all shapes, or some, the largest first, so that the smaller ones find its memory in the pool."""
        gc.collect()
        for shape, shares in self._kinds(sorted(self._shapes if shapes is None else shapes, reverse=True)):
            self.record(shape, shares=shares)

    def record_one(self) -> bool:
        """Records one graph more: the largest of every kind first, then those of few rows. False: there are all."""
        for shape, shares in self._kinds([*self.largest(), *self._shapes]):
            known = self._sharing if shares else self._plain
            if shape not in known and (shape, shares, False) not in self._without:
                self.record(shape, shares=shares)
                return True
        return False

    @torch.inference_mode()
    def record(self, shape: StepShape, *, shares: bool, adapted: bool = False) -> bool:
        """If need be (0.1 s). Returns whether the graph is there: not where it found no memory."""
        kind = self._adapted if adapted else self._sharing if shares else self._plain
        if shape in kind:
            return True
        if (shape, shares, adapted) in self._without:
            return False
        try:
            kind[shape] = self._record_adapted(shape) if adapted else self._record_plain(shape, shares)
        except torch.OutOfMemoryError:
            logger.warning("no memory for the graph of %s: such steps are launched kernel by kernel", shape)
            self._without.add((shape, shares, adapted))
        return shape in kind

    def _kinds(self, shapes: Sequence[StepShape]) -> Iterator[tuple[StepShape, bool]]:
        """Each shape, and again where there is a graph of it for decodes that share pages."""
        for shape in shapes:
            yield shape, False
            if shape in self._for_sharing:
                yield shape, True

    def _record_plain(self, shape: StepShape, shares: bool) -> _Graph:
        if self._adapters is not None:
            self._adapters.select(None, 0)
        return self._record(shape, self._make_groups(shape.decodes) if shares else None)

    def _record_adapted(self, shape: StepShape) -> _Graph:
        assert self._adapters is not None
        with self._adapters.rehearsing():  # every layer may have an adapter one day
            graph = self._record(shape, adapted=True)
        self._adapters.select(None, 0)
        return graph

    def largest(self) -> list[StepShape]:
        """Of every kind: what is computed on the way is shared by kinds but for the pieces that memory falls into."""
        kinds = {(shape.only_decodes, shape.few_rows): shape for shape in self._shapes}  # sorted: the last one stays
        return list(kinds.values())

    def drop(self) -> None:
        for graphs in (self._plain, self._sharing, self._adapted):
            graphs.clear()
        self._logits = self._pool = None

    def shape_of(self, batch: StepBatch, rows: StepRows) -> StepShape | None:
        """The smallest shape that serves the step, recorded or not; None: no graph could."""
        levels, needs = batch.sharing.decodes, StepNeeds.of(rows)
        few = needs.rows - needs.decodes < needs.others * MANY_ROWS  # so they had better share what they read
        if len(levels) > 1 or (batch.sharing.prefills and few):
            return None
        adapted = has_adapters(rows)
        if adapted and (levels or self._adapters is None):
            return None
        return next(
            (
                shape
                for shape in self._shapes
                if (not levels or shape in self._for_sharing)
                and (shape.only_decodes or not adapted)
                and shape.fits(needs)
            ),
            None,
        )

    def replay(
        self,
        shape: StepShape,
        levels: Levels,
        arrays: StepArrays,
        rows: StepRows,
        temperature: np.ndarray,
        keys: np.ndarray,
    ) -> GraphOutput:
        """One step of this shape, which is recorded. The tables are up to date; temperature float32 `[n]` and keys
        int32 `[n, 2]` are the sampler's, for each row that is sampled."""
        graph = (self._adapted if has_adapters(rows) else self._sharing if levels else self._plain)[shape]
        staging = self._stagings[self._turn]
        self._turn = 1 - self._turn
        staging.copied.synchronize()  # of the step before the last: a wait only where steps that sample nothing follow
        fields = StepFields.of(staging.buffer, shape)
        fields.fill(shape, arrays, rows, temperature, keys, padding_slot=self._inputs.tables.padding_slot)
        self._copy(staging, shape)
        if graph.shared is not None:
            self._write_groups(graph.shared, levels, shape.decodes)
        graph.graph.replay()
        return graph.output.first(len(arrays.sample_rows))

    def _record(self, shape: StepShape, shared: _Groups | None = None, *, adapted: bool = False) -> _Graph:
        self._stage_padding(shape)
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._run(shape, shared, adapted)  # compiles kernels and chooses algorithms: neither can be recorded
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with (
            _no_collection(),
            torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"),
        ):
            output = self._run(shape, shared, adapted)
        return _Graph(graph, output, shared)

    def _make_groups(self, size: int) -> _Groups:
        nothing = self._inputs.group_arrays((), size, num_levels=1, num_groups=size)
        groups, own_starts = (to_device(array.copy(), self._device) for array in (nothing.groups, nothing.own_starts))
        return _Groups(groups, own_starts, min(size, nothing.max_rows))

    def _write_groups(self, shared: _Groups, levels: Levels, size: int) -> None:
        arrays = self._inputs.group_arrays(levels, size, num_levels=1, num_groups=size)
        if arrays is not shared.written:
            shared.written = None  # until both are there: the first copy alone would be taken for the old ones
            shared.groups.copy_(to_device(arrays.groups.copy(), self._device))
            shared.own_starts.copy_(to_device(arrays.own_starts.copy(), self._device))
            shared.written = arrays

    def _run(self, shape: StepShape, shared: _Groups | None, adapted: bool) -> GraphOutput:
        fields = StepFields.of(self._buffer, shape)
        if adapted and self._adapters is not None:
            self._adapters.select(fields.adapter_rows, self._adapters.limits.max_loras)
        step = step_tensors(fields, shape, self._inputs, max_model_len=self._max_model_len)
        if shared is not None:
            pages = shared_pages(shared.groups, shared.own_starts, step.metadata.block_table, shared.max_rows)
            step = replace(step, metadata=replace(step.metadata, shared_decodes=pages))
        logits = self._forward(step, shape.only_decodes)
        if self._logits is None:
            most = max(shape.samples for shape in self._shapes)
            self._logits = logits.new_empty(most, logits.shape[1])
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
def _no_collection() -> Iterator[None]:
    """What the garbage collector frees while a graph is recorded (an older graph, a pinned buffer) would spoil it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def has_adapters(rows: StepRows) -> bool:
    return bool((rows.adapters != NO_ADAPTER).any())
