"""A step's sequences -> the flat tensors of one forward. Vectorised: no Python work per token. Knows no model.

Input tokens that the host does not know yet come from `last_tokens`, where the step before leaves them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from attention_backend.metadata import PagedMetadata, SharedPages
from models.batch import IN_FLIGHT, NO_ADAPTER, StepBatch
from models.block_tables import BlockTables
from models.copies import to_device
from models.prefix_groups import GroupArrays, group_arrays, shared_pages
from models.shared_runs import Levels
from models.step_rows import StepArrays, StepRows

#: Sections of the staging buffer start at multiples of this many bytes (a cache line; more than any dtype needs).
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class StepTensors:
    """One flattened batch. On a CPU it is valid until the next `StepInputs.build` (the memory is used again)."""

    input_ids: Tensor  # int64 [1, num_tokens]
    position_ids: Tensor  # int64 [1, num_tokens]
    sample_rows: Tensor  # int64 [num_samples]: rows of the flat batch whose logits are wanted, and padding behind them
    metadata: PagedMetadata
    sampled: PagedMetadata | None  # of sample_rows, for the last layer's attention; None: it had better see all rows
    sample_slots: np.ndarray  # int64 [num_samples], without padding
    sample_slots_on_device: Tensor  # the same; of a graph's step, with padding
    sample_positions: np.ndarray  # int64 [num_samples]: where the sampled tokens will stand
    adapter_rows: Tensor | None  # int32 [num_tokens]: each row's adapter slot; None: no row has one
    num_adapter_slots: int  # all of adapter_rows are below

    def with_short_contexts(self) -> "StepTensors":
        """The same shapes, but sequences that share nothing see their new tokens and one key at most before them."""
        metadata, sampled = self.metadata, self.sampled
        shortest = metadata.cu_seqlens_q.diff() + 1
        if sampled is not None:
            sampled = replace(sampled, seq_lens=sampled.seq_lens.clamp(max=metadata.max_seqlen_q + 1))
        metadata = replace(metadata, seq_lens=torch.minimum(metadata.seq_lens, shortest))
        return replace(self, metadata=metadata, sampled=sampled)


class StepInputs:
    """Keeps each slot's block table and last token, and one staging buffer (pinned for CUDA), copied once per step."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_blocks_per_seq: int,
        block_size: int,
        device: torch.device,
        max_group_rows: int = 0,
        sample_sizes: Sequence[int] = (),
    ) -> None:
        """`max_group_rows`: decodes of a group that shares pages, if its kernel takes no more (0: any number).
        `sample_sizes`: rising numbers to one of which `build` pads a step's samples where it has rows for that. Those
        of graphs of decodes: the last layer's products and the head's are theirs then, whose kernels are loaded. To
        load one may wait for everything that was launched."""
        self.tables = BlockTables(max_num_seqs, max_blocks_per_seq, device)
        #: int64 [max_num_seqs + 1], on the device: what was sampled last for each slot; the last is for padding
        self.last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self._block_size = block_size
        self._max_seqs = max_num_seqs
        self._max_tokens = max_num_batched_tokens
        self._device = device
        self._max_group_rows = max_group_rows
        self._sample_sizes = sample_sizes
        bytes_needed = (
            8 * (5 * max_num_batched_tokens + max_num_seqs)
            + 4 * (2 * max_num_seqs + 1 + 2 * max_num_batched_tokens)
            + 10 * _ALIGNMENT
        )
        self._staging = torch.empty(bytes_needed, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._bytes = self._staging.numpy()
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def forget(self, slot: int) -> None:
        """The next sequence in this slot has other blocks."""
        self.tables.forget(slot)

    def note(self, slots: Tensor, token_ids: Tensor) -> None:
        """The tokens that a step has sampled: a later step may name them as IN_FLIGHT. A slot with drafts comes several
        times, and any of its tokens stays: nobody knows which is right until the host has looked, so none is named."""
        self.last_tokens.index_copy_(0, slots, token_ids)

    def update_tables(self, batch: StepBatch, rows: StepRows) -> None:
        """Before the step, in the order of the current stream."""
        places, blocks = self.tables.update(batch.seqs, rows.slots, rows.computed, rows.totals)
        if len(places) and self._device.type == "cuda":
            self.tables.apply(to_device(places, self._device), to_device(blocks, self._device))

    def slot_mapping(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Where the KV cache keeps tokens: int64 like `slots`. The tables are up to date."""
        block, offset = np.divmod(positions, self._block_size)
        mapping = self.tables.host[slots, block].astype(np.int64)
        mapping *= self._block_size
        mapping += offset
        return mapping

    def arrays(self, batch: StepBatch, rows: StepRows) -> StepArrays:
        """The tables are up to date."""
        lengths, sampled = rows.lengths, rows.sampled
        num_decodes, ends = rows.num_decodes, np.cumsum(rows.lengths)
        num_tokens = int(ends[-1])
        token_ids = np.empty(num_tokens, np.int64)
        token_ids[:num_decodes] = rows.first_tokens[:num_decodes]
        for seq, end, length in zip(batch.seqs[num_decodes:], ends[num_decodes:], lengths[num_decodes:], strict=True):
            token_ids[end - length : end] = seq.token_ids
        positions = np.arange(num_tokens) + np.repeat(rows.computed - (ends - lengths), lengths)
        row_slots = np.repeat(rows.slots, lengths)
        num_samples = (rows.drafts + 1)[sampled]
        sample_rows = np.arange(num_samples.sum()) + np.repeat(ends[sampled] - np.cumsum(num_samples), num_samples)
        slot_mapping = self.slot_mapping(row_slots, positions)
        return StepArrays(token_ids, positions, slot_mapping, row_slots, ends, sample_rows)

    def build(self, batch: StepBatch, rows: StepRows | None = None) -> StepTensors:
        """Raises ValueError for a batch larger than the limits given at the start."""
        rows = StepRows.of(batch) if rows is None else rows
        lengths, totals = rows.lengths, rows.totals
        num_seqs, num_decodes, num_tokens = len(lengths), rows.num_decodes, int(lengths.sum())
        num_adapter_slots = int(rows.adapters.max()) - NO_ADAPTER
        if num_tokens > self._max_tokens or num_seqs > self._max_seqs:
            raise ValueError(f"a step of {num_tokens} tokens in {num_seqs} sequences is larger than this runner's")
        self.update_tables(batch, rows)
        arrays = self.arrays(batch, rows)
        if self._copied is not None:
            # A step that samples nothing waits for no device: its copy may still stand in line behind the step before.
            self._copied.synchronize()

        layout = _Layout(self._bytes)
        ids = layout.put(np.int64, arrays.token_ids)
        positions = layout.put(np.int64, arrays.positions)
        slot_mapping = layout.put(np.int64, arrays.slot_mapping)
        all_slots = layout.put(np.int64, rows.slots)
        num_samples = len(arrays.sample_rows)
        padding = self._padded(num_samples, num_tokens) - num_samples
        sample_rows = layout.put(np.int64, np.pad(arrays.sample_rows, (0, padding)))
        padded_slots = np.pad(arrays.sample_slots, (0, padding), constant_values=self.tables.padding_slot)
        sample_slots = layout.put(np.int64, padded_slots)
        cu_seqlens = layout.put(np.int32, np.concatenate(([0], arrays.ends)))
        seq_lens = layout.put(np.int32, totals)
        sample_keys = layout.put(np.int32, np.pad(arrays.sample_positions, (0, padding)))  # none of padding
        adapter_rows = layout.put(np.int32, np.repeat(rows.adapters, lengths if num_adapter_slots else 0))

        staged = self._staging[: layout.used].to(self._device, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))
        input_ids, on_device = layout.tensor(staged, ids), layout.tensor(staged, all_slots)
        if (rows.first_tokens == IN_FLIGHT).any():
            first = layout.tensor(staged, cu_seqlens)[:-1].long()
            input_ids[first] = self.known(input_ids[first], on_device)
        width = -(-int(totals.max()) // self._block_size)
        tables = self.tables.device[:, :width]
        block_table = tables.index_select(0, on_device)
        sharing = batch.sharing
        metadata = PagedMetadata(
            cu_seqlens_q=layout.tensor(staged, cu_seqlens),
            seq_lens=layout.tensor(staged, seq_lens),
            block_table=block_table,
            slot_mapping=layout.tensor(staged, slot_mapping),
            num_decodes=num_decodes,
            max_seqlen_q=int(lengths.max()),
            max_seqlen_k=int(totals.max()),
            shared_decodes=self._shared(sharing.decodes, num_decodes, block_table[:num_decodes]),
            shared_prefills=self._shared(
                sharing.prefills, tuple(lengths[num_decodes:].tolist()), block_table[num_decodes:]
            ),
        )
        slots_on_device = layout.tensor(staged, sample_slots)
        return StepTensors(
            input_ids=input_ids[None],
            position_ids=layout.tensor(staged, positions)[None],
            sample_rows=layout.tensor(staged, sample_rows),
            metadata=metadata,
            sampled=single_samples(tables, slots_on_device, layout.tensor(staged, sample_keys), metadata)
            if num_adapter_slots == 0 and not batch.scored and rows.samples_alone(sharing)
            else None,
            sample_slots=arrays.sample_slots,
            sample_slots_on_device=slots_on_device[:num_samples],
            sample_positions=arrays.sample_positions,
            adapter_rows=layout.tensor(staged, adapter_rows) if num_adapter_slots else None,
            num_adapter_slots=num_adapter_slots,
        )

    def group_arrays(self, levels: Levels, rows: int | tuple[int, ...], **shape: int) -> GroupArrays:
        """See `prefix_groups.group_arrays`. `rows` is a number for decodes."""
        most = self._max_group_rows if isinstance(rows, int) else 0
        return group_arrays(levels, rows, block_size=self._block_size, max_rows=most or None, **shape)

    def _padded(self, num_samples: int, num_rows: int) -> int:
        if num_samples == 0:
            return 0
        return next((size for size in self._sample_sizes if num_samples <= size <= num_rows), num_samples)

    def _shared(self, levels: Levels, rows: int | tuple[int, ...], block_table: Tensor) -> SharedPages | None:
        if not levels:
            return None
        arrays = self.group_arrays(levels, rows)
        groups, own_starts = (to_device(array.copy(), self._device) for array in (arrays.groups, arrays.own_starts))
        return shared_pages(groups, own_starts, block_table, arrays.max_rows)

    def known(self, token_ids: Tensor, slots: Tensor) -> Tensor:
        """token_ids int64 `[n]` with what was sampled last for the slots in place of IN_FLIGHT."""
        return torch.where(token_ids == IN_FLIGHT, self.last_tokens.index_select(0, slots), token_ids)


def single_samples(tables: Tensor, slots: Tensor, keys: Tensor, step: PagedMetadata) -> PagedMetadata:
    """A step's samples as sequences of one row, whose keys are in their pages: slots int64 and keys int32
    `[num_samples]`, tables int32 `[slots, max_blocks]`."""
    return PagedMetadata.of_single_rows(
        keys, tables.index_select(0, slots), step.slot_mapping[: len(slots)], step.max_seqlen_k
    )


class _Layout:
    """Hands out aligned sections of the staging buffer, and finds the same sections in its copy on the device."""

    def __init__(self, buffer: np.ndarray) -> None:
        self._buffer = buffer
        self._base = buffer.__array_interface__["data"][0]
        self.used = 0

    def put(self, dtype: type[np.generic], values: np.ndarray) -> np.ndarray:
        start = -(-self.used // _ALIGNMENT) * _ALIGNMENT
        self.used = start + len(values) * np.dtype(dtype).itemsize
        section = self._buffer[start : self.used].view(dtype)
        section[:] = values
        return section

    def tensor(self, staged: Tensor, section: np.ndarray) -> Tensor:
        start = section.__array_interface__["data"][0] - self._base
        dtype = torch.int64 if section.dtype == np.int64 else torch.int32
        return staged[start : start + section.nbytes].view(dtype).view(section.shape)
