"""The engine's counts over all of its lives: it starts again from nothing, and whoever draws them sees no fall.
Knows no process and no metric's name."""

from dataclasses import replace

import msgspec

from server.engine.messages import EngineStats
from server.engine.offload_stats import DiskStats, OffloadStats

STEPS = (
    "prompt_tokens", "generation_tokens", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits",
    "adapter_placements", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "corrupted_requests",
)  # fmt: skip
BLOCKS = ("queried_blocks", "stored_blocks", "loaded_blocks", "skipped_blocks", "failed_blocks", "declined_blocks")
DISK = ("read_bytes", "written_bytes", "num_damaged")


class Lives:
    """What an engine reports comes in, what is to be shown comes out."""

    def __init__(self) -> None:
        self._before: EngineStats | None = None  # as the last life ended
        self._now: EngineStats | None = None

    def report(self, stats: EngineStats) -> EngineStats:
        """The living engine's state, and the counts of all."""
        self._now = stats if self._before is None else _sum(self._before, stats)
        return self._now

    def end(self) -> EngineStats | None:
        """The counts alone, for what a dead engine had running, nobody has. None: none has reported yet."""
        if self._now is not None:
            self._before, self._now = _of_nobody(self._now), None
        return self._before


def _of_nobody(stats: EngineStats) -> EngineStats:
    offload = None if stats.offload is None else replace(stats.offload, num_held=0)
    changes = dict.fromkeys(
        ("num_running", "num_waiting", "num_blocks", "num_free_blocks", "step_tokens", "missing_graphs"), 0
    )
    return msgspec.structs.replace(
        stats, **changes, running_adapters=(), waiting_adapters=(), offload=offload, longest_turn=0.0
    )


def _sum(before: EngineStats, now: EngineStats) -> EngineStats:
    kernels = before.kernel_calls.keys() | now.kernel_calls.keys()
    return msgspec.structs.replace(
        now,
        kernel_calls={name: before.kernel_calls.get(name, 0) + now.kernel_calls.get(name, 0) for name in kernels},
        offload=_sum_of_blocks(before.offload, now.offload),
        **{name: getattr(before, name) + getattr(now, name) for name in STEPS},
    )


def _sum_of_blocks(before: OffloadStats | None, now: OffloadStats | None) -> OffloadStats | None:
    if before is None or now is None:
        return now
    sums = {name: getattr(before, name) + getattr(now, name) for name in BLOCKS}
    return replace(now, disk=_sum_of_files(before.disk, now.disk), **sums)


def _sum_of_files(before: DiskStats | None, now: DiskStats | None) -> DiskStats | None:
    if before is None or now is None:
        return now
    return replace(now, **{name: getattr(before, name) + getattr(now, name) for name in DISK})
