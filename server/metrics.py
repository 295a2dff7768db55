"""What is observed of requests and replies, in one registry: vLLM's names under `longwave:`. What is only read when
somebody scrapes is `collectors`'. Must not know how anything is measured, nor requests' texts.

Times are seconds. TTFT counts from the request's arrival, before tokenisation; queue, prefill and decode are the
engine's intervals.
"""

from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from server.collectors import (
    ENGINE,
    LABELS,
    EngineCollector,
    FilesCollector,
    FineTuningCollector,
    ServerCollector,
    ServerHealth,
    TrainingCollector,
)
from server.engine.adapter_registry import AdapterInfo
from server.engine.messages import EngineReady, EngineStats, RequestTimes
from server.finetune.stats import FineTuningStats
from server.training.stats import TrainingStats

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
                640, 2560)  # fmt: skip
ITL_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LATENCY_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKEN_BUCKETS = (*(base * 10**power for power in range(6) for base in (1, 2, 5)), 1_000_000)
COUNT_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 128)


class Metrics:
    """The registry of one server. API-side observations come in by name; the engine's state is read when scraped."""

    def __init__(
        self,
        model_name: str,
        stats: Callable[[], EngineStats | None],
        public_adapters: Callable[[], Iterable[AdapterInfo]],
    ) -> None:
        """`public_adapters`: those whose names everybody may read."""
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._engine = EngineCollector(model_name, stats, public_adapters)
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

    def started(self, stages: dict[str, float]) -> None:
        """Seconds of the server's start by stage."""
        self._engine.stages = stages

    def watch_server(self, health: Callable[[], ServerHealth]) -> None:
        self.registry.register(ServerCollector(self._model_name, health))

    def watch_files(self, failures: Callable[[], int]) -> None:
        self.registry.register(FilesCollector(self._model_name, failures))

    def watch_fine_tuning(self, stats: FineTuningStats) -> None:
        self.registry.register(FineTuningCollector(self._model_name, stats))

    def watch_training(self, stats: TrainingStats) -> None:
        self.registry.register(TrainingCollector(self._model_name, stats))

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
