"""The engine process from first to last line: load, announce, loop, end. Started by process.EngineProcess with one JSON
argument. Logs carry no prompts and no token ids."""

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from models.stages import Stages
from server.engine.adapters import AdapterTable
from server.engine.config import EngineConfig
from server.engine.core import EngineCore
from server.engine.disk_reads import ComputeSeconds
from server.engine.disk_tier import DiskTier, DiskTierError
from server.engine.drafting import Drafter, DraftLimits
from server.engine.kv_cache import KVCache
from server.engine.limits import SchedulerConfig
from server.engine.link import EngineLink
from server.engine.messages import EngineFailed, EngineLoading
from server.engine.offload import WORTH_A_COPY, Offload
from server.engine.offloading_cache import OffloadingKVCache
from server.engine.parent import die_with_parent
from server.engine.rehearsal import measure, rehearse
from server.engine.runner import CannotServeError, LoadedRunner, load
from server.engine.scheduler import Scheduler
from server.engine.sharing import PrefixSharing
from server.engine.step_learning import FIRST_STEPS, LearningStepTime
from server.engine.step_time import StepTimeModel, StepWork
from server.log import begin_log

logger = logging.getLogger("server.engine.worker")  # __name__ is "__main__" in the process itself


@dataclass(frozen=True, slots=True)
class WorkerArguments:
    config: EngineConfig
    directory: str  # where the sockets are
    parent_pid: int
    log_level: int
    spawned: float  # time.monotonic() of the API process: on one host all processes share this clock


class ToldStages(Stages):
    """A start, whose stages the API process hears of as they end."""

    def __init__(self, begin: float, tell: Callable[[EngineLoading], None]) -> None:
        super().__init__(begin)
        self._tell = tell

    def end(self, name: str) -> None:
        super().end(name)
        self._tell(EngineLoading(self.seconds))


def make_cache(config: EngineConfig, loaded: LoadedRunner, compute_seconds: ComputeSeconds) -> KVCache:
    """Raises CannotServeError for a directory that cannot hold blocks."""
    runner, memory = loaded.runner, loaded.host_memory
    if memory is None:
        return KVCache(runner.num_blocks, runner.block_size, enable_prefix_caching=config.enable_prefix_caching)
    disk = None
    if config.kv_offload_dir is not None:
        try:
            disk = DiskTier(
                Path(config.kv_offload_dir),
                max_bytes=int(config.kv_offload_disk_gb * 2**30),
                fingerprint=loaded.fingerprint(),
                block_bytes=memory.block_bytes,
                block_size=runner.block_size,
            )
        except DiskTierError as error:
            raise CannotServeError(str(error)) from error
        logger.info("%d KV blocks found in %s", disk.stats().num_blocks, config.kv_offload_dir)
    logger.info("host memory for %d KV blocks", memory.num_slots)
    min_blocks = -(-WORTH_A_COPY // runner.block_size)
    offload = Offload(memory, disk, min_blocks=min_blocks, compute_seconds=compute_seconds)
    return OffloadingKVCache(runner.num_blocks, runner.block_size, offload)


def make_scheduler(config: EngineConfig, loaded: LoadedRunner) -> Scheduler:
    limits = SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=loaded.max_num_batched_tokens,
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        queue_timeout=config.queue_timeout,
        tpot_target=loaded.tpot_target,
    )
    adapters = AdapterTable(config.max_loras, config.max_cpu_loras) if config.enable_lora else AdapterTable()
    shared = loaded.runner.sharing_limits
    sharing = None if shared is None else PrefixSharing(shared)
    step_time = _step_time(limits, loaded)
    return Scheduler(
        limits,
        make_cache(config, loaded, step_time.prompt_seconds),
        adapters,
        sharing=sharing,
        drafter=_drafter(config, loaded),
        step_time=step_time,
    )


def _drafter(config: EngineConfig, loaded: LoadedRunner) -> Drafter | None:
    if config.num_speculative_tokens == 0:
        return None
    # A GPU computes some rows more while it reads the weights.
    max_rows, step_cost, row_cost = (128, 0.1, 0.003) if loaded.overlaps else (32, 0.0, 0.05)
    return Drafter(
        DraftLimits(
            num_tokens=config.num_speculative_tokens,
            lookup_max=config.prompt_lookup_max,
            lookup_min=config.prompt_lookup_min,
            max_rows=max_rows,
            step_cost=step_cost,
            row_cost=row_cost,
            overlaps=loaded.overlaps,
        )
    )


def _step_time(limits: SchedulerConfig, loaded: LoadedRunner) -> StepTimeModel:
    """Measured before anybody waits, as far as that takes no time to speak of: a CPU's are learned as they come."""
    if not loaded.overlaps:
        samples = measure(loaded, FIRST_STEPS, max_rows=min(limits.max_num_batched_tokens, limits.max_model_len))
        model: StepTimeModel = LearningStepTime(samples)
    elif limits.tpot_target is None:
        return StepTimeModel()
    else:
        samples = rehearse(
            loaded,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
        )
        model = StepTimeModel.fit(samples)
    logger.info("step time from %d rehearsals: %s", len(samples), model)
    return model


def _expected_turn(loaded: LoadedRunner, model: StepTimeModel) -> float:
    """Seconds of a large step: a CPU may need minutes for its first one. The model learns, so this changes."""
    return 0.0 if loaded.overlaps else model.predict(StepWork().with_chunk(0, loaded.max_num_batched_tokens))


def serve(config: EngineConfig, link: EngineLink, stages: Stages) -> None:
    """Blocks until the engine was told to shut down. Raises whatever makes it unable to serve."""
    loaded = load(config, stages)
    loaded.runner.warm_up(all_graphs=False)  # those that nobody has wanted yet are recorded in quiet moments
    scheduler = make_scheduler(config, loaded)
    stages.end("step times")
    core = EngineCore(loaded, scheduler, link, stages, partial(_expected_turn, loaded, scheduler.step_time))
    gc.collect()
    gc.freeze()  # weights and code live as long as the process: no collection needs to look at them again
    logger.info("engine ready: %s on %s, %d blocks", loaded.model, loaded.device, loaded.runner.num_blocks)
    core.run()


def main() -> None:
    arguments = msgspec.json.decode(sys.argv[1], type=WorkerArguments)
    die_with_parent(arguments.parent_pid)
    gc.set_threshold(50_000, 20, 1_000_000)  # a full one walks through every module, later every request and block
    # Sent to everybody: the API process drains, then tells us. And a terminal may stop who writes to it unasked.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    begin_log(arguments.log_level, "engine")
    link = EngineLink(arguments.directory)
    status = 0
    try:
        serve(arguments.config, link, ToldStages(arguments.spawned, lambda loading: link.send([loading])))
    except CannotServeError as error:
        logger.debug("where that was found", exc_info=True)
        link.send([EngineFailed(str(error))])  # the API process logs it
        status = 1
    except BaseException as error:
        logger.exception("engine failed")
        link.send([EngineFailed(f"{type(error).__name__}: {error}")])
        status = 1
    link.close()
    logging.shutdown()
    os._exit(status)  # a lost device may hang or crash in destructors, and there is nothing left to tidy


if __name__ == "__main__":
    main()
