"""A step's sequences -> the flat tensors of one forward. Vectorised: no Python work per token. Knows no model."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attention_backend.metadata import PagedMetadata
from models.batch import NO_ADAPTER, ScheduledSeq, StepBatch

#: Sections of the staging buffer start at multiples of this many bytes (a cache line; more than any dtype needs).
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class StepTensors:
    """One flattened batch. On a CPU it is valid until the next `StepInputs.build` (the memory is used again)."""

    input_ids: Tensor  # int64 [1, num_tokens]
    position_ids: Tensor  # int64 [1, num_tokens]
    sample_rows: Tensor  # int64 [num_samples]: rows of the flat batch whose logits are wanted
    metadata: PagedMetadata
    sample_slots: np.ndarray  # int64 [num_samples]
    sample_positions: np.ndarray  # int64 [num_samples]: where the sampled tokens will stand
    adapter_rows: Tensor | None  # int32 [num_tokens]: each row's adapter slot; None: no row has one
    num_adapter_slots: int  # all of adapter_rows are below


class StepInputs:
    """Keeps a block table row per slot and one staging buffer (pinned for CUDA), copied once per step."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_blocks_per_seq: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._block_size = block_size
        self._max_tokens = max_num_batched_tokens
        self._device = device
        self._tables = np.zeros((max_num_seqs, max_blocks_per_seq), np.int32)
        self._written = np.zeros(max_num_seqs, np.int64)  # entries of each table row that are valid
        self._next_position = np.full(max_num_seqs, -1, np.int64)  # where a slot goes on if nothing interrupted it
        bytes_needed = (
            8 * (3 * max_num_batched_tokens + max_num_seqs)
            + 4 * (2 * max_num_seqs + 1 + self._tables.size + max_num_batched_tokens)
            + 9 * _ALIGNMENT
        )
        self._staging = torch.empty(bytes_needed, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._bytes = self._staging.numpy()
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def forget(self, slot: int) -> None:
        """The next sequence in this slot has other blocks."""
        self._next_position[slot] = -1

    def build(self, batch: StepBatch) -> StepTensors:
        """Raises ValueError for a batch larger than the limits given at the start."""
        seqs = batch.seqs
        num_seqs = len(seqs)
        slots = np.fromiter((seq.slot for seq in seqs), np.int64, num_seqs)
        lengths = np.fromiter((len(seq.token_ids) for seq in seqs), np.int64, num_seqs)
        computed = np.fromiter((seq.num_computed for seq in seqs), np.int64, num_seqs)
        sampled = np.fromiter((seq.sample for seq in seqs), np.bool_, num_seqs)
        adapters = np.fromiter((seq.adapter_slot for seq in seqs), np.int32, num_seqs)
        num_adapter_slots = int(adapters.max()) - NO_ADAPTER
        ends = np.cumsum(lengths)
        num_tokens = int(ends[-1])
        if num_tokens > self._max_tokens or num_seqs > self._tables.shape[0]:
            raise ValueError(f"a step of {num_tokens} tokens in {num_seqs} sequences is larger than this runner's")
        totals = computed + lengths
        self._update_tables(seqs, slots, computed, totals)
        if self._copied is not None:
            # A step that samples nothing waits for no device: its copy may still stand in line behind the step before.
            self._copied.synchronize()

        layout = _Layout(self._bytes)
        ids = layout.take(np.int64, num_tokens)
        positions = layout.take(np.int64, num_tokens)
        slot_mapping = layout.take(np.int64, num_tokens)
        sample_rows = layout.take(np.int64, int(sampled.sum()))
        cu_seqlens = layout.take(np.int32, num_seqs + 1)
        seq_lens = layout.take(np.int32, num_seqs)
        width = -(-int(totals.max()) // self._block_size)
        block_table = layout.take(np.int32, num_seqs * width).reshape(num_seqs, width)
        adapter_rows = layout.take(np.int32, num_tokens if num_adapter_slots else 0)

        num_decodes = int(np.argmax(lengths != 1)) if (lengths != 1).any() else num_seqs
        ids[:num_decodes] = np.fromiter((seq.token_ids[0] for seq in seqs[:num_decodes]), np.int64, num_decodes)
        for seq, end, length in zip(seqs[num_decodes:], ends[num_decodes:], lengths[num_decodes:], strict=True):
            ids[end - length : end] = seq.token_ids
        positions[:] = np.arange(num_tokens) + np.repeat(computed - (ends - lengths), lengths)
        block, offset = np.divmod(positions, self._block_size)
        slot_mapping[:] = self._tables[np.repeat(slots, lengths), block]
        slot_mapping *= self._block_size
        slot_mapping += offset
        sample_rows[:] = ends[sampled] - 1
        cu_seqlens[0] = 0
        cu_seqlens[1:] = ends
        seq_lens[:] = totals
        np.take(self._tables[:, :width], slots, axis=0, out=block_table)
        if num_adapter_slots:
            adapter_rows[:] = np.repeat(adapters, lengths)

        staged = self._staging[: layout.used].to(self._device, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))
        return StepTensors(
            input_ids=layout.tensor(staged, ids)[None],
            position_ids=layout.tensor(staged, positions)[None],
            sample_rows=layout.tensor(staged, sample_rows),
            metadata=PagedMetadata(
                cu_seqlens_q=layout.tensor(staged, cu_seqlens),
                seq_lens=layout.tensor(staged, seq_lens),
                block_table=layout.tensor(staged, block_table),
                slot_mapping=layout.tensor(staged, slot_mapping),
                num_decodes=num_decodes,
                max_seqlen_q=int(lengths.max()),
                max_seqlen_k=int(totals.max()),
            ),
            sample_slots=slots[sampled],
            sample_positions=totals[sampled],
            adapter_rows=layout.tensor(staged, adapter_rows) if num_adapter_slots else None,
            num_adapter_slots=num_adapter_slots,
        )

    def _update_tables(
        self, seqs: Sequence[ScheduledSeq], slots: np.ndarray, computed: np.ndarray, totals: np.ndarray
    ) -> None:
        """Writes new entries only; a slot that does not go on where it stopped (preempted, reused) is written anew."""
        self._written[slots[self._next_position[slots] != computed]] = 0
        self._next_position[slots] = totals
        grown = np.fromiter((len(seq.block_ids) for seq in seqs), np.int64, len(seqs)) - self._written[slots]
        for i in np.flatnonzero(grown):
            slot, block_ids = slots[i], seqs[int(i)].block_ids
            start = self._written[slot]
            self._tables[slot, start : len(block_ids)] = block_ids[start:]
            self._written[slot] = len(block_ids)


class _Layout:
    """Hands out aligned sections of the staging buffer, and finds the same sections in its copy on the device."""

    def __init__(self, buffer: np.ndarray) -> None:
        self._buffer = buffer
        self._base = buffer.__array_interface__["data"][0]
        self.used = 0

    def take(self, dtype: type[np.generic], count: int) -> np.ndarray:
        start = -(-self.used // _ALIGNMENT) * _ALIGNMENT
        self.used = start + count * np.dtype(dtype).itemsize
        return self._buffer[start : self.used].view(dtype)

    def tensor(self, staged: Tensor, section: np.ndarray) -> Tensor:
        start = section.__array_interface__["data"][0] - self._base
        dtype = torch.int64 if section.dtype == np.int64 else torch.int32
        return staged[start : start + section.nbytes].view(dtype).view(section.shape)
