"""What a recorded step reads and what differs from step to step: views of one buffer that is copied before a replay."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from attention_backend.heuristics.layer_chain import MOST_KEYS
from attention_backend.metadata import PagedMetadata
from models.batch import NO_ADAPTER
from models.inputs import StepInputs, StepTensors, single_samples
from models.step_rows import StepArrays, StepRows
from models.step_shapes import StepShape


@dataclass(frozen=True, slots=True)
class StepFields:
    """Of one shape."""

    token_ids: Tensor  # int64 [rows]
    position_ids: Tensor  # int64 [rows]
    slot_mapping: Tensor  # int64 [rows]; -1: nothing is stored
    row_slots: Tensor  # int64 [rows]
    sequence_slots: Tensor  # int64 [sequences]
    sample_rows: Tensor  # int64 [samples]
    sample_keys: Tensor  # int32 [samples]: that each sees; 0: of padding
    keys: Tensor  # int32 [samples, 2]
    seq_lens: Tensor  # int32 [sequences]; 0: of a decode that is not there
    cu_seqlens: Tensor  # int32 [sequences + 1]
    temperature: Tensor  # float32 [samples]
    adapter_rows: Tensor  # int32 [rows]; -1: the base model alone

    @classmethod
    def of(cls, buffer: Tensor, shape: StepShape) -> "StepFields":
        """buffer: uint8, at least `num_bytes(shape)`."""
        views, start = {}, 0
        for name, dtype, size in _layout(shape):
            end = start + size * dtype.itemsize
            views[name] = buffer[start:end].view(dtype)
            start = end
        views["keys"] = views["keys"].view(shape.samples, 2)
        return cls(**views)

    def fill(
        self,
        shape: StepShape,
        arrays: StepArrays,
        rows: StepRows,
        temperature: np.ndarray,
        keys: np.ndarray,
        *,
        padding_slot: int,
    ) -> None:
        """For fields on the host: one step that fits the shape. temperature float32 `[n]` and keys int32 `[n, 2]` are
        the sampler's, for each row that is sampled."""
        num_rows, decodes = len(arrays.token_ids), shape.decodes_in_front(rows.num_decodes)
        padding = shape.padding(num_rows)
        _put(self.token_ids, arrays.token_ids, 0)
        _put(self.position_ids, arrays.positions, 0)
        _put(self.slot_mapping, arrays.slot_mapping, -1)
        _put(self.row_slots, arrays.row_slots, padding_slot)
        _put(self.adapter_rows, np.repeat(rows.adapters, rows.lengths), NO_ADAPTER)
        _put(self.sample_rows, arrays.sample_rows, 0)
        _put(self.sample_keys, arrays.sample_positions, 0)
        _put(self.temperature, temperature, 0)
        _put(self.keys, keys, 0)
        _put(self.sequence_slots[: shape.decodes], rows.slots[:decodes], padding_slot)
        _put(self.seq_lens[: shape.decodes], rows.totals[:decodes], 0)
        _put(self.cu_seqlens[: shape.decodes + 1], np.arange(decodes + 1), decodes)
        if shape.only_decodes:
            self.seq_lens[decodes:] = 1  # of the padding page
            _put(self.cu_seqlens, np.arange(shape.rows + 1), 0)
            return
        lengths = np.concatenate((rows.lengths[decodes:], np.array(padding, np.int64)))
        _put(self.sequence_slots[shape.decodes :], rows.slots[decodes:], padding_slot)
        _put(self.seq_lens[shape.decodes :], np.concatenate((rows.totals[decodes:], padding)), 0)
        _put(self.cu_seqlens[shape.decodes + 1 :], decodes + np.cumsum(lengths), shape.rows)
        positions = self.position_ids.numpy()[num_rows:]
        positions[:] = np.arange(len(positions)) % max(1, shape.longest)


def num_bytes(shape: StepShape) -> int:
    return sum(size * dtype.itemsize for _, dtype, size in _layout(shape))


def _layout(shape: StepShape) -> Iterator[tuple[str, torch.dtype, int]]:
    """Fields of eight bytes first, so that all are aligned."""
    eight, four = torch.int64, torch.int32
    kinds = {
        "token_ids": (eight, shape.rows),
        "position_ids": (eight, shape.rows),
        "slot_mapping": (eight, shape.rows),
        "row_slots": (eight, shape.rows),
        "sequence_slots": (eight, shape.sequences),
        "sample_rows": (eight, shape.samples),
        "sample_keys": (four, shape.samples),
        "keys": (four, 2 * shape.samples),
        "seq_lens": (four, shape.sequences),
        "cu_seqlens": (four, shape.sequences + 1),
        "temperature": (torch.float32, shape.samples),
        "adapter_rows": (four, shape.rows),
    }
    for field in fields(StepFields):
        yield field.name, *kinds[field.name]


def _put(field: Tensor, values: np.ndarray, padding: int) -> None:
    array = field.numpy()
    array[: len(values)] = values
    array[len(values) :] = padding


def step_tensors(fields: StepFields, shape: StepShape, inputs: StepInputs, *, max_model_len: int) -> StepTensors:
    """The forward's inputs, computed from the fields where they lie."""
    here = None if shape.only_decodes or not shape.decodes else fields.seq_lens[: shape.decodes, None, None] > 0
    tables, slots = inputs.tables.device, fields.row_slots
    if not shape.only_decodes:
        slots = slots.index_select(0, fields.sample_rows)
    metadata = PagedMetadata(
        cu_seqlens_q=fields.cu_seqlens,
        seq_lens=fields.seq_lens,
        block_table=tables.index_select(0, fields.sequence_slots),
        slot_mapping=fields.slot_mapping,
        num_decodes=shape.decodes,
        max_seqlen_q=max(1, shape.longest),
        max_seqlen_k=max_model_len if shape.any_length else min(max_model_len, MOST_KEYS),
        decodes_here=here,
    )
    return StepTensors(
        input_ids=inputs.known(fields.token_ids, fields.row_slots)[None],
        position_ids=fields.position_ids[None],
        sample_rows=fields.sample_rows,
        metadata=metadata,
        sampled=single_samples(tables, slots, fields.sample_keys, metadata) if shape.samples_alone else None,
        sample_slots=np.empty(0, np.int64),
        sample_slots_on_device=slots,
        sample_positions=np.empty(0, np.int64),
        adapter_rows=None,
        num_adapter_slots=0,
    )
