"""What the slower tiers of the prefix cache have done, as the engine reports it. Counters are since its start."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DiskStats:
    num_blocks: int
    read_bytes: int
    written_bytes: int
    num_damaged: int  # files that were not what their names said
    is_full: bool  # a write failed of late, and there are none for a while
    is_hanging: bool  # something was begun, and nothing of its kind has ended for long


@dataclass(frozen=True, slots=True)
class OffloadStats:
    num_slots: int
    num_held: int
    block_bytes: int
    queried_blocks: int  # looked for here, by requests that did not find them on the device
    stored_blocks: int  # device to host
    loaded_blocks: int  # host to device
    skipped_blocks: int  # given up without a copy, as too many went at once
    failed_blocks: int  # neither stored nor loaded, as there was no memory for the copy
    declined_blocks: int  # on disk, but sooner computed than read
    disk: DiskStats | None
