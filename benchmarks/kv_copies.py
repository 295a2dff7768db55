"""How fast blocks of keys and values cross between a device and host memory, and what decode steps beside them lose.
Knows no engine."""

import time
from collections.abc import Callable

from models.batch import SamplingParams, ScheduledSeq, StepBatch
from models.kv_offload import KVOffload
from models.runner import ModelRunner
from models.transfers import Transfers

DECODES = 16  # sequences of the step that runs beside copies


def store_all(memory: KVOffload, pairs: list[tuple[int, int]]) -> None:
    done, queued = 0, 0
    while done < len(pairs):
        count = min(memory.store_room(), len(pairs) - queued)
        if count:
            memory.queue(Transfers(stores=pairs[queued : queued + count]))
            queued += count
        done += len(memory.finished().stored_slots)


def load_all(memory: KVOffload, pairs: list[tuple[int, int]], turn: Callable[[], object] = bool) -> None:
    memory.queue(Transfers(loads=pairs))
    done = 0
    while done < len(pairs):
        turn()
        done += len(memory.finished().loaded_blocks)


def copies(memory: KVOffload, count: int) -> dict[str, float]:
    """GB/s (10^9) of `count` blocks, the best of three."""
    stores = [(1 + i, i) for i in range(count)]
    loads = [(i, 1 + i) for i in range(count)]
    best = {}
    for name, run in (("store", lambda: store_all(memory, stores)), ("load", lambda: load_all(memory, loads))):
        seconds = []
        for _ in range(3):
            begin = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - begin)
        best[f"{name}_gb_per_s"] = round(count * memory.block_bytes / min(seconds) / 1e9, 2)
    return best


def steps_beside_loads(runner: ModelRunner, memory: KVOffload, count: int) -> dict[str, float]:
    """Milliseconds of a decode step (the median) alone, and while blocks come in."""
    first = runner.num_blocks - DECODES
    batch = StepBatch(tuple(ScheduledSeq(slot, [5], 10, [first + slot], True) for slot in range(DECODES)))
    for slot in range(DECODES):
        runner.add_request(slot, SamplingParams(temperature=0.0, ignore_eos=True), [5])
    times: list[float] = []

    def step() -> None:
        begin = time.perf_counter()
        runner.execute(batch)
        times.append(1e3 * (time.perf_counter() - begin))

    for _ in range(20):
        step()
    alone = sorted(times[5:])[7]
    times.clear()
    load_all(memory, [(i, 1 + i) for i in range(count)], step)
    beside = sorted(times)[len(times) // 2]
    for slot in range(DECODES):
        runner.remove_request(slot)
    return {"step_alone_ms": round(alone, 3), "step_beside_loads_ms": round(beside, 3), "steps_beside": len(times)}
