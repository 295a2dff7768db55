"""The groups of a recorded step whose decodes share pages: tensors at fixed addresses, written before a replay where
the groups are not those of the replay before. Knows no graph."""

from dataclasses import replace

import torch

from models.copies import to_device
from models.inputs import StepInputs, StepTensors
from models.prefix_groups import GroupArrays, shared_pages
from models.shared_runs import Levels


class RecordedGroups:
    """As many groups on each of `num_levels` levels as there are decodes; at first, of nothing."""

    def __init__(self, inputs: StepInputs, num_decodes: int, num_levels: int, device: torch.device) -> None:
        self._inputs = inputs
        self._num_decodes = num_decodes
        self._num_levels = num_levels
        self._device = device
        nothing = self._arrays(())
        self._groups = to_device(nothing.groups.copy(), device)  # int32 [levels, NUM_FIELDS, decodes + 1]
        self._own_starts = to_device(nothing.own_starts.copy(), device)  # int32 [decodes]
        self._max_rows = min(num_decodes, nothing.max_rows)
        self._written: GroupArrays | None = nothing

    def write(self, levels: Levels) -> None:
        """In the order of the current stream. Raises ValueError for more levels than there are."""
        arrays = self._arrays(levels)
        if arrays is not self._written:
            self._written = None  # until both are there: the first copy alone would be taken for the old ones
            self._groups.copy_(to_device(arrays.groups.copy(), self._device))
            self._own_starts.copy_(to_device(arrays.own_starts.copy(), self._device))
            self._written = arrays

    def shared_by(self, step: StepTensors) -> StepTensors:
        """The step with these groups in front: `num_decodes` decodes, those of padding included. Reads no value."""
        pages = shared_pages(self._groups, self._own_starts, step.metadata.block_table, self._max_rows)
        return replace(step, metadata=replace(step.metadata, shared_decodes=pages), sampled=None)

    def _arrays(self, levels: Levels) -> GroupArrays:
        count = self._num_decodes
        return self._inputs.group_arrays(levels, count, num_levels=self._num_levels, num_groups=count)
