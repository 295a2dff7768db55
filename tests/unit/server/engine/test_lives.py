"""Counters of an engine that dies and comes back never fall."""

from dataclasses import fields, replace

import msgspec

from server.engine.lives import BLOCKS, DISK, STEPS, Lives
from server.engine.messages import EngineStats
from server.engine.offload_stats import DiskStats, OffloadStats

DISK_STATS = DiskStats(4, 5, 6, 1, is_full=True, is_hanging=False)
OFFLOAD = OffloadStats(8, 3, 100, 9, 8, 7, 6, 5, 4, DISK_STATS)
STATS = EngineStats(2, 1, 10, 4, 100, 50, 3, 40, 30, {"a": 7}, 5, 4, ("x",), ("y",), 6, OFFLOAD, 3, 2, 1, 9, 0.5, 8)


def test_a_first_life_is_shown_as_it_is() -> None:
    assert Lives().end() is None
    assert Lives().report(STATS) is STATS


def test_counts_of_all_lives_add_up_and_nobody_runs_between_them() -> None:
    lives = Lives()
    lives.report(STATS)
    between = lives.end()
    assert between is not None
    assert between == lives.end()
    assert (between.num_running, between.num_waiting, between.missing_graphs, between.running_adapters) == (0, 0, 0, ())
    assert [getattr(between, name) for name in STEPS] == [getattr(STATS, name) for name in STEPS]
    for _ in range(2):  # what one engine reports again is counted once
        shown = lives.report(msgspec.structs.replace(STATS, kernel_calls={"a": 1, "b": 2}))
    assert [getattr(shown, name) for name in STEPS] == [2 * getattr(STATS, name) for name in STEPS]
    assert shown.kernel_calls == {"a": 8, "b": 2}
    assert (shown.num_running, shown.num_blocks, shown.longest_turn) == (2, 10, 0.5)
    assert shown.offload is not None
    assert shown.offload.disk == DiskStats(4, 10, 12, 2, is_full=True, is_hanging=False)
    doubled = {name: 2 * getattr(OFFLOAD, name) for name in BLOCKS}
    assert shown.offload == replace(OFFLOAD, disk=shown.offload.disk, **doubled)
    lives.end()
    assert lives.report(STATS).prompt_tokens == 300


def test_every_number_is_a_count_or_known_as_a_state() -> None:
    states = {
        "num_running",
        "num_waiting",
        "num_blocks",
        "num_free_blocks",
        "step_tokens",
        "max_loras",
        "missing_graphs",
    }
    numbers = {field.name for field in msgspec.structs.fields(EngineStats) if field.type is int}
    assert numbers == states | set(STEPS)
    assert {field.name for field in fields(OffloadStats)} - set(BLOCKS) == {
        "num_slots", "num_held", "block_bytes", "disk",
    }  # fmt: skip
    assert {field.name for field in fields(DiskStats)} - set(DISK) == {"num_blocks", "is_full", "is_hanging"}
