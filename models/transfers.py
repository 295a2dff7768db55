"""Copies between KV blocks and slots of host memory, as numbers. Knows no tensors."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Transfers:
    """All stores come before all loads: a block may be given up and loaded anew in one step."""

    stores: Sequence[tuple[int, int]] = ()  # (block, host slot)
    loads: Sequence[tuple[int, int]] = ()  # (host slot, block)


@dataclass(frozen=True, slots=True)
class FinishedTransfers:
    """What arrived since the last time this was asked, and what never will: there was no memory to copy it."""

    stored_slots: Sequence[int] = ()
    loaded_blocks: Sequence[int] = ()
    failed_slots: Sequence[int] = ()  # of stores
    failed_blocks: Sequence[int] = ()  # of loads
