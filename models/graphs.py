"""The decode step as CUDA graphs: the model and the choice of tokens, recorded once per batch size and replayed.

A step of n rows runs in the smallest graph of n rows or more; rows without a sequence attend to the padding page. What
differs from step to step lies at fixed addresses: one buffer that is copied before each replay, the slots' block tables
and the tokens sampled last. Lengths are read on the device, so graphs that were recorded short are right when long.
Steps whose sequences share pages have graphs of their own, in which one pass reads those pages for all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import attention_backend
from attention_backend.metadata import PagedMetadata
from models.batch import StepBatch
from models.copies import to_device
from models.inputs import StepInputs, StepRows, StepTensors
from models.prefix_groups import GroupArrays, shared_pages
from models.shared_runs import Levels

#: Rows of the graphs: padding is at most a third of a batch.
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)

Forward = Callable[[StepTensors], Tensor]  # logits [rows, vocab] of every row


@dataclass(frozen=True, slots=True)
class GraphOutput:
    """Of the first rows of a replay; valid until the next one."""

    logits: Tensor  # [n, vocab]
    token_ids: Tensor  # int64 [n]
    finite: Tensor  # bool [n]
    slots: Tensor  # int64 [n]


@dataclass(frozen=True, slots=True)
class _Fields:
    """What a decode step needs of each row, as views of one buffer."""

    token_ids: Tensor  # int64
    position_ids: Tensor  # int64
    slot_mapping: Tensor  # int64; -1: nothing is stored
    slots: Tensor  # int64
    keys: Tensor  # int32 [rows, 2]
    seq_lens: Tensor  # int32
    temperature: Tensor  # float32

    @classmethod
    def of(cls, buffer: Tensor, rows: int) -> "_Fields":
        """buffer: uint8 `[rows * _ROW_BYTES]`."""
        words = [buffer[8 * rows * i : 8 * rows * (i + 1)] for i in range(5)]
        halves = [buffer[40 * rows + 4 * rows * i : 40 * rows + 4 * rows * (i + 1)] for i in range(2)]
        token_ids, position_ids, slot_mapping, slots = (word.view(torch.int64) for word in words[:4])
        return cls(
            token_ids=token_ids,
            position_ids=position_ids,
            slot_mapping=slot_mapping,
            slots=slots,
            keys=words[4].view(torch.int32).view(rows, 2),
            seq_lens=halves[0].view(torch.int32),
            temperature=halves[1].view(torch.float32),
        )


_ROW_BYTES = 48


@dataclass(frozen=True, slots=True)
class _Staging:
    """A pinned buffer, and when it may be written again."""

    buffer: Tensor
    fields: _Fields
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
    logits: Tensor
    token_ids: Tensor
    finite: Tensor
    shared: _Groups | None


class DecodeGraphs:
    """Graphs of a runner's decode steps without adapters, for up to `max_num_seqs` rows."""

    def __init__(
        self,
        forward: Forward,
        inputs: StepInputs,
        *,
        max_num_seqs: int,
        max_model_len: int,
        with_sharing: bool,
        device: torch.device,
    ) -> None:
        """`with_sharing`: whether steps may name shared pages, on one level."""
        self._forward = forward
        self._inputs = inputs
        self._max_model_len = max_model_len
        self._device = device
        self._sizes = [size for size in SIZES if size < max_num_seqs] + [max_num_seqs]
        self._with_sharing = with_sharing
        self._plain: dict[int, _Graph] = {}
        self._sharing: dict[int, _Graph] = {}
        rows = self._sizes[-1]
        self._buffer = torch.zeros(rows * _ROW_BYTES, dtype=torch.uint8, device=device)
        self._fields = _Fields.of(self._buffer, rows)
        self._cu_seqlens = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._stagings = [self._make_staging(rows) for _ in range(2)]
        self._turn = 0
        self._stream = torch.cuda.Stream(device)

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int] | None = None) -> None:
        """Records all sizes, the largest first, so that the smaller ones find its memory in the pool."""
        pool = torch.cuda.graph_pool_handle()
        self._stage_padding()
        for size in sorted(self._sizes if sizes is None else sizes, reverse=True):
            self._plain[size] = self._record(size, None, pool)
            if self._with_sharing and size > 1:
                self._sharing[size] = self._record(size, self._make_groups(size), pool)

    def unrecorded_bytes(self) -> int:
        """What logits of the sizes that were not recorded will take: unlike what is computed on the way, graphs share
        no logits."""
        logits = [graphs[max(graphs)].logits for graphs in (self._plain, self._sharing) if graphs]
        rows = sum(size for size in self._sizes if size not in self._plain)
        return sum(rows * one.shape[1] * one.itemsize for one in logits)

    def drop(self) -> None:
        self._plain.clear()
        self._sharing.clear()

    def serves(self, batch: StepBatch, rows: StepRows) -> bool:
        """Whether the step is nothing but decodes that sample, without adapters, and no more than were recorded."""
        levels = batch.sharing.decodes
        graphs = self._sharing if levels else self._plain
        return (
            bool(graphs)
            and len(levels) <= 1
            and len(rows.slots) <= max(graphs)
            and rows.num_decodes == len(rows.slots)
            and bool(rows.sampled.all())
            and bool((rows.adapters < 0).all())
        )

    def replay(self, levels: Levels, rows: StepRows, temperature: np.ndarray, keys: np.ndarray) -> GraphOutput:
        """One step that is served. The tables are up to date; temperature float32 `[n]` and keys int32 `[n, 2]` are the
        sampler's."""
        graphs = self._sharing if levels else self._plain
        count = len(rows.slots)
        size = min(size for size in graphs if size >= count)
        staging = self._stagings[self._turn]
        self._turn = 1 - self._turn
        staging.copied.synchronize()  # of the step before the last, whose tokens were read: no wait
        fields = staging.fields
        _fill(fields.token_ids, rows.first_tokens, size, 0)
        _fill(fields.position_ids, rows.computed, size, 0)
        _fill(fields.slot_mapping, self._inputs.slot_mapping(rows.slots, rows.computed), size, -1)
        _fill(fields.slots, rows.slots, size, self._inputs.tables.padding_slot)
        _fill(fields.seq_lens, rows.totals, size, 1)
        _fill(fields.temperature, temperature, size, 0)
        _fill(fields.keys, keys, size, 0)
        self._copy(staging)
        graph = graphs[size]
        if graph.shared is not None:
            self._write_groups(graph.shared, levels, size)
        graph.graph.replay()
        return GraphOutput(
            graph.logits[:count], graph.token_ids[:count], graph.finite[:count], self._fields.slots[:count]
        )

    def _record(self, size: int, shared: _Groups | None, pool: Any) -> _Graph:
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._run(size, shared)  # compiles kernels and chooses algorithms: neither can be recorded
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            logits, token_ids, finite = self._run(size, shared)
        return _Graph(graph, logits, token_ids, finite, shared)

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

    def _run(self, size: int, shared: _Groups | None) -> tuple[Tensor, Tensor, Tensor]:
        fields, slots = self._fields, self._fields.slots[:size]
        block_table = self._inputs.tables.device.index_select(0, slots)
        metadata = PagedMetadata(
            cu_seqlens_q=self._cu_seqlens[: size + 1],
            seq_lens=fields.seq_lens[:size],
            block_table=block_table,
            slot_mapping=fields.slot_mapping[:size],
            num_decodes=size,
            max_seqlen_q=1,
            max_seqlen_k=self._max_model_len,
            shared_decodes=None
            if shared is None
            else shared_pages(shared.groups, shared.own_starts, block_table, shared.max_rows),
        )
        step = StepTensors(
            input_ids=self._inputs.known(fields.token_ids[:size], slots)[None],
            position_ids=fields.position_ids[:size][None],
            sample_rows=self._cu_seqlens[:size].long(),
            metadata=metadata,
            sample_slots=np.empty(0, np.int64),
            sample_slots_on_device=slots,
            sample_positions=np.empty(0, np.int64),
            adapter_rows=None,
            num_adapter_slots=0,
        )
        logits = self._forward(step)
        return logits, *attention_backend.choose_tokens(logits, fields.temperature[:size], fields.keys[:size])

    def _stage_padding(self) -> None:
        staging = self._stagings[0]
        size = self._sizes[-1]
        nothing = np.empty(0, np.int64)
        for name, padding in (("slot_mapping", -1), ("slots", self._inputs.tables.padding_slot), ("seq_lens", 1)):
            _fill(getattr(staging.fields, name), nothing, size, padding)
        self._copy(staging)

    def _copy(self, staging: _Staging) -> None:
        self._buffer.copy_(staging.buffer, non_blocking=True)
        staging.copied.record(torch.cuda.current_stream(self._device))

    def _make_staging(self, rows: int) -> _Staging:
        buffer = torch.zeros(rows * _ROW_BYTES, dtype=torch.uint8, pin_memory=True)
        return _Staging(buffer, _Fields.of(buffer, rows), torch.cuda.Event())


def _fill(field: Tensor, values: np.ndarray, size: int, padding: int) -> None:
    array = field.numpy()
    array[: len(values)] = values
    array[len(values) : size] = padding
