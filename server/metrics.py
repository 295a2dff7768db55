"""Every metric name, once: vLLM's names under `longwave:`. Must not know how anything is measured, nor requests' texts.

Times are seconds. TTFT counts from the request's arrival, before tokenisation; queue, prefill and decode are the
engine's intervals.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from server.engine.messages import EngineReady, EngineStats, RequestTimes
from server.engine.offload_stats import DiskStats, OffloadStats
from server.finetune.stats import FineTuningStats
from server.training.stats import TrainingStats

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
ENGINE: Final = "0"
LABELS: Final = ("model_name", "engine")
METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
                640, 2560)  # fmt: skip
ITL_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LATENCY_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKEN_BUCKETS = (*(base * 10**power for power in range(6) for base in (1, 2, 5)), 1_000_000)
COUNT_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 128)


class Metrics:
    """The registry of one server. API-side observations come in by name; the engine's state is read when scraped."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats | None]) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._engine = _EngineCollector(model_name, stats)
        self.registry.register(self._engine)
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", TTFT_BUCKETS)
        self.inter_token_latency = self._histogram("inter_token_latency_seconds", ITL_BUCKETS)
        self.time_per_output_token = self._histogram("request_time_per_output_token_seconds", ITL_BUCKETS)
        self.e2e_latency = self._histogram("e2e_request_latency_seconds", LATENCY_BUCKETS)
        self.queue_time = self._histogram("request_queue_time_seconds", LATENCY_BUCKETS)
        self.inference_time = self._histogram("request_inference_time_seconds", LATENCY_BUCKETS)
        self.prefill_time = self._histogram("request_prefill_time_seconds", LATENCY_BUCKETS)
        self.decode_time = self._histogram("request_decode_time_seconds", LATENCY_BUCKETS)
        self.prompt_tokens = self._histogram("request_prompt_tokens", TOKEN_BUCKETS)
        self.generation_tokens = self._histogram("request_generation_tokens", TOKEN_BUCKETS)
        self.max_generation_tokens = self._histogram("request_max_num_generation_tokens", TOKEN_BUCKETS)
        self.prefill_computed_tokens = self._histogram("request_prefill_kv_computed_tokens", TOKEN_BUCKETS)
        self.params_n = self._histogram("request_params_n", COUNT_BUCKETS)
        self.params_max_tokens = self._histogram("request_params_max_tokens", TOKEN_BUCKETS)
        self._success = Counter(
            "longwave:request_success", "Requests answered.", (*LABELS, "finished_reason"), registry=self.registry
        )
        self._http_requests = Counter(
            "http_requests", "HTTP replies.", ("handler", "method", "status"), registry=self.registry
        )
        self._http_seconds = Histogram(
            "http_request_duration_seconds", "HTTP requests.", ("handler", "method"), registry=self.registry,
            buckets=LATENCY_BUCKETS,
        )  # fmt: skip

    def learn(self, ready: EngineReady) -> None:
        self._engine.ready = ready

    def watch_fine_tuning(self, stats: FineTuningStats) -> None:
        self.registry.register(_FineTuningCollector(self._model_name, stats))

    def watch_training(self, stats: TrainingStats) -> None:
        self.registry.register(_TrainingCollector(self._model_name, stats))

    def finished(self, reason: str) -> None:
        self._success.labels(self._model_name, ENGINE, reason).inc()

    def observe_times(self, times: RequestTimes) -> None:
        """The engine's report of one ended request."""
        self.prompt_tokens.observe(times.num_prompt_tokens)
        self.generation_tokens.observe(times.num_generation_tokens)
        if not times.num_generation_tokens:  # it was aborted in the queue or in its prefill: there are no intervals
            return
        self.queue_time.observe(times.scheduled - times.queued)
        self.prefill_time.observe(times.first_token - times.scheduled)
        self.decode_time.observe(times.last_token - times.first_token)
        self.inference_time.observe(times.last_token - times.scheduled)
        if times.num_generation_tokens > 1:
            decoded = times.num_generation_tokens - 1
            self.time_per_output_token.observe((times.last_token - times.first_token) / decoded)

    def observe_http(self, handler: str, method: str, status: int, seconds: float) -> None:
        """HTTP allows any word as a method: unknown ones share a series, or a caller could make any number of them."""
        method = method if method in METHODS else "other"
        self._http_requests.labels(handler, method, str(status)).inc()
        self._http_seconds.labels(handler, method).observe(seconds)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _histogram(self, name: str, buckets: Iterable[float]) -> Histogram:
        text = name.replace("_", " ")
        whole = Histogram(f"longwave:{name}", text, LABELS, registry=self.registry, buckets=tuple(buckets))
        return whole.labels(self._model_name, ENGINE)


class _EngineCollector(Collector):
    """The engine's own counters and gauges, as it last reported them."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats | None]) -> None:
        self.ready: EngineReady | None = None
        self._stats = stats
        self._labels = [model_name, ENGINE]

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is not None:
            yield from self._gauges(stats)
            yield from self._counters(stats)
        if self.ready is not None:
            yield self._cache_config(self.ready)

    def _gauges(self, stats: EngineStats) -> Iterator[Metric]:
        used = 1 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0
        for name, text, value in (
            ("num_requests_running", "Requests in the running batch.", stats.num_running),
            ("num_requests_waiting", "Requests waiting for their first step.", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", used),
            ("last_step_tokens", "Tokens of the engine's last step.", stats.step_tokens),
        ):
            gauge = GaugeMetricFamily(f"longwave:{name}", text, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge

    def _counters(self, stats: EngineStats) -> Iterator[Metric]:
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens processed.", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated.", stats.generation_tokens),
            ("num_preemptions", "Requests preempted for lack of KV blocks.", stats.num_preemptions),
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
        names = (",".join(stats.running_adapters), ",".join(stats.waiting_adapters))
        info.add_metric([*self._labels, str(stats.max_loras), *names], time.time())
        yield info
        placements = CounterMetricFamily("longwave:lora_placements", "Adapters copied into a slot.", labels=LABELS)
        placements.add_metric(self._labels, stats.adapter_placements)
        yield placements

    def _offload(self, stats: OffloadStats, block_size: int) -> Iterator[Metric]:
        disk = stats.disk or DiskStats(0, 0, 0, 0, False)
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
            ("kv_offload_disk_damaged", "KV blocks on disk that were not what their names said.", disk.num_damaged),
        ):
            counter = CounterMetricFamily(f"longwave:{name}", text, labels=LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        used = stats.num_held / stats.num_slots
        for name, text, share in (
            ("kv_offload_cpu_cache_usage_perc", "Share of host slots in use, 0 to 1.", used),
            ("kv_offload_disk_blocks", "KV blocks on disk.", disk.num_blocks),
            ("kv_offload_disk_full", "1: a write failed, and no more are tried.", float(disk.is_full)),
        ):
            gauge = GaugeMetricFamily(f"longwave:{name}", text, labels=LABELS)
            gauge.add_metric(self._labels, share)
            yield gauge

    def _cache_config(self, ready: EngineReady) -> Metric:
        labels = ("block_size", "num_gpu_blocks", "dtype", "device")
        info = GaugeMetricFamily("longwave:cache_config_info", "The KV cache.", labels=(*LABELS, *labels))
        info.add_metric([*self._labels, str(ready.block_size), str(ready.num_blocks), ready.dtype, ready.device], 1)
        return info


class _FineTuningCollector(Collector):
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
        ):
            counter = CounterMetricFamily(f"longwave:{name}", text, labels=LABELS)
            counter.add_metric(self._labels, value)
            yield counter


class _TrainingCollector(Collector):
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
