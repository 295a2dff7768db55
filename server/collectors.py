"""Metrics that are read when somebody scrapes: the engine's, fine-tuning's and low-level training's own counts. Must
not know how anything is counted, nor requests' texts."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from server.engine.adapter_registry import AdapterInfo
from server.engine.messages import EngineReady, EngineStats
from server.engine.offload_stats import DiskStats, OffloadStats
from server.finetune.stats import FineTuningStats
from server.training.stats import TrainingStats

ENGINE: Final = "0"
LABELS: Final = ("model_name", "engine")


@dataclass(frozen=True, slots=True)
class ServerHealth:
    live: bool  # as /health/live says
    ready: bool  # as /health/ready says
    engine_deaths: int  # engine processes that ended by themselves, or were ended as they hung


class ServerCollector(Collector):
    """Whether there is a server to send work to; exported from the first moment on, without an engine too."""

    def __init__(self, model_name: str, health: Callable[[], ServerHealth]) -> None:
        self._health = health
        self._labels = [model_name, ENGINE]

    def collect(self) -> Iterator[Metric]:
        health = self._health()
        live = GaugeMetricFamily("longwave:server_live", "0: the engine is silent, or stays down.", labels=LABELS)
        live.add_metric(self._labels, float(health.live))
        yield live
        ready = GaugeMetricFamily("longwave:server_ready", "1: the server takes work.", labels=LABELS)
        ready.add_metric(self._labels, float(health.ready))
        yield ready
        deaths = CounterMetricFamily("longwave:engine_deaths", "Engine processes that ended.", labels=LABELS)
        deaths.add_metric(self._labels, health.engine_deaths)
        yield deaths


class EngineCollector(Collector):
    """The engine's own counters and gauges, as it last reported them."""

    def __init__(
        self,
        model_name: str,
        stats: Callable[[], EngineStats | None],
        public_adapters: Callable[[], Iterable[AdapterInfo]],
    ) -> None:
        self.ready: EngineReady | None = None
        self.stages: dict[str, float] = {}  # of the server's start, in seconds
        self._stats = stats
        self._public_adapters = public_adapters
        self._labels = [model_name, ENGINE]

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is not None:
            yield from self._gauges(stats)
            yield from self._counters(stats)
        if self.ready is not None:
            yield self._cache_config(self.ready)
        if self.stages:
            yield self._start()

    def _gauges(self, stats: EngineStats) -> Iterator[Metric]:
        used = 1 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0
        for name, text, value in (
            ("num_requests_running", "Requests in the running batch.", stats.num_running),
            ("num_requests_waiting", "Requests waiting for their first step.", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", used),
            ("last_step_tokens", "Tokens of the engine's last step.", stats.step_tokens),
            ("cuda_graphs_missing", "CUDA graphs for which there was no memory.", stats.missing_graphs),
        ):
            gauge = GaugeMetricFamily(f"longwave:{name}", text, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge

    def _counters(self, stats: EngineStats) -> Iterator[Metric]:
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens processed.", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated.", stats.generation_tokens),
            ("num_preemptions", "Requests preempted for lack of KV blocks.", stats.num_preemptions),
            ("corrupted_requests", "Requests failed, as their logits were not finite.", stats.corrupted_requests),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_cache_hits),
            ("spec_decode_num_drafts", "Sequences of steps with drafts.", stats.num_drafts),
            ("spec_decode_num_draft_tokens", "Tokens drafted.", stats.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Drafted tokens that were right.", stats.num_accepted_tokens),
        ):
            counter = CounterMetricFamily(f"longwave:{name}", text, labels=LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        if stats.max_loras:
            yield from self._adapters(stats)
        if stats.offload is not None and self.ready is not None:
            yield from self._offload(stats.offload, self.ready.block_size)
        calls = CounterMetricFamily(
            "longwave:attention_kernel_calls", "Attention calls by the kernel that served.", labels=(*LABELS, "kernel")
        )
        for kernel, count in sorted(stats.kernel_calls.items()):
            calls.add_metric([*self._labels, kernel], count)
        yield calls

    def _adapters(self, stats: EngineStats) -> Iterator[Metric]:
        labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        info = GaugeMetricFamily(
            "longwave:lora_requests_info", "Adapters of running and waiting requests.", labels=(*LABELS, *labels)
        )
        owned = GaugeMetricFamily(
            "longwave:lora_owned_adapters", "Adapters in use whose names are not told.", labels=(*LABELS, "state")
        )
        public = {info.name for info in self._public_adapters()}
        names = []
        for state, adapters in (("running", stats.running_adapters), ("waiting", stats.waiting_adapters)):
            told = [name for name in adapters if name in public]
            names.append(",".join(told))
            owned.add_metric([*self._labels, state], len(adapters) - len(told))
        info.add_metric([*self._labels, str(stats.max_loras), *names], time.time())
        yield info
        yield owned
        placements = CounterMetricFamily("longwave:lora_placements", "Adapters copied into a slot.", labels=LABELS)
        placements.add_metric(self._labels, stats.adapter_placements)
        yield placements

    def _offload(self, stats: OffloadStats, block_size: int) -> Iterator[Metric]:
        disk = stats.disk or DiskStats(0, 0, 0, 0, is_full=False, is_hanging=False)
        moved = CounterMetricFamily(
            "longwave:kv_offload_total_bytes", "KV moved between tiers.", labels=(*LABELS, "transfer_type")
        )
        for kind, count in (
            ("GPU_to_CPU", stats.stored_blocks * stats.block_bytes),
            ("CPU_to_GPU", stats.loaded_blocks * stats.block_bytes),
            ("CPU_to_disk", disk.written_bytes),
            ("disk_to_CPU", disk.read_bytes),
        ):
            moved.add_metric([*self._labels, kind], count)
        yield moved
        for name, text, value in (
            ("external_prefix_cache_queries", "Tokens looked up in slower tiers.", stats.queried_blocks * block_size),
            ("external_prefix_cache_hits", "Tokens brought back from slower tiers.", stats.loaded_blocks * block_size),
            ("kv_offload_stores_skipped", "KV blocks given up without a copy.", stats.skipped_blocks),
            ("kv_offload_copies_failed", "KV blocks not copied for want of memory.", stats.failed_blocks),
            ("kv_offload_reads_declined", "KV blocks on disk that were sooner computed.", stats.declined_blocks),
            ("kv_offload_disk_damaged", "KV blocks on disk that were not what their names said.", disk.num_damaged),
        ):
            counter = CounterMetricFamily(f"longwave:{name}", text, labels=LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        used = stats.num_held / stats.num_slots
        for name, text, share in (
            ("kv_offload_cpu_cache_usage_perc", "Share of host slots in use, 0 to 1.", used),
            ("kv_offload_disk_blocks", "KV blocks on disk.", disk.num_blocks),
            ("kv_offload_disk_full", "1: a write failed, and none is tried for a minute.", float(disk.is_full)),
            ("kv_offload_disk_hangs", "1: a read or write has not ended for half a minute.", float(disk.is_hanging)),
        ):
            gauge = GaugeMetricFamily(f"longwave:{name}", text, labels=LABELS)
            gauge.add_metric(self._labels, share)
            yield gauge

    def _cache_config(self, ready: EngineReady) -> Metric:
        labels = ("block_size", "num_gpu_blocks", "dtype", "device")
        info = GaugeMetricFamily("longwave:cache_config_info", "The KV cache.", labels=(*LABELS, *labels))
        info.add_metric([*self._labels, str(ready.block_size), str(ready.num_blocks), ready.dtype, ready.device], 1)
        return info

    def _start(self) -> Metric:
        seconds = GaugeMetricFamily(
            "longwave:start_seconds", "The server's start, stage by stage.", labels=(*LABELS, "stage")
        )
        for stage, taken in tuple(self.stages.items()):  # a start may add to them meanwhile
            seconds.add_metric([*self._labels, stage], taken)
        return seconds


class FilesCollector(Collector):
    """What the store of uploaded files could not do."""

    def __init__(self, model_name: str, failures: Callable[[], int]) -> None:
        self._failures = failures
        self._labels = [model_name, ENGINE]

    def collect(self) -> Iterator[Metric]:
        failures = CounterMetricFamily(
            "longwave:file_storage_failures", "Times that uploaded files could not be kept or read.", labels=LABELS
        )
        failures.add_metric(self._labels, self._failures())
        yield failures


class FineTuningCollector(Collector):
    """Jobs as the store last counted them, and what this server's trainers did."""

    def __init__(self, model_name: str, stats: FineTuningStats) -> None:
        self._stats = stats
        self._labels = [model_name, ENGINE]

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        jobs = GaugeMetricFamily("longwave:finetune_jobs", "Fine-tuning jobs.", labels=(*LABELS, "status"))
        ended = CounterMetricFamily(
            "longwave:finetune_jobs_ended", "Fine-tuning jobs that ended here.", labels=(*LABELS, "status")
        )
        for family, counts in ((jobs, stats.jobs), (ended, stats.ended)):
            for status, count in sorted(counts.items()):
                family.add_metric([*self._labels, status], count)
            yield family
        for name, text, value in (
            ("finetune_steps", "Optimiser steps of fine-tuning jobs.", stats.steps),
            ("finetune_tokens", "Tokens trained on.", stats.tokens),
            ("finetune_trainer_crashes", "Trainer processes that ended without a word.", stats.crashes),
            ("finetune_waits", "Times that a job was put off for want of room.", stats.waits),
            ("finetune_storage_failures", "Times that jobs could not be written or read.", stats.storage_failures),
        ):
            counter = CounterMetricFamily(f"longwave:{name}", text, labels=LABELS)
            counter.add_metric(self._labels, value)
            yield counter


class TrainingCollector(Collector):
    """Low-level training: live models, and what was done with them."""

    def __init__(self, model_name: str, stats: TrainingStats) -> None:
        self._stats = stats
        self._labels = [model_name, ENGINE]

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        models = GaugeMetricFamily("longwave:training_models", "Live models of low-level training.", labels=LABELS)
        models.add_metric(self._labels, stats.models)
        yield models
        calls = CounterMetricFamily(
            "longwave:training_calls", "Calls of low-level training that ended.", labels=(*LABELS, "call", "outcome")
        )
        for (call, outcome), count in sorted(stats.calls.items()):
            calls.add_metric([*self._labels, call, outcome], count)
        yield calls
        for name, text, value in (
            ("training_tokens", "Tokens of forward and forward_backward.", stats.tokens),
            ("training_process_crashes", "Training processes that ended by themselves.", stats.crashes),
        ):
            counter = CounterMetricFamily(f"longwave:{name}", text, labels=LABELS)
            counter.add_metric(self._labels, value)
            yield counter
