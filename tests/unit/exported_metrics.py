"""The names of everything a server exports, told by a registry that has seen one of each observation."""

from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

from server.collectors import ServerHealth
from server.engine.messages import EngineReady, EngineStats
from server.engine.offload_stats import OffloadStats
from server.finetune import FineTuningStats
from server.metrics import Metrics
from server.training import TrainingStats


def exported_families() -> dict[str, set[str]]:
    """Metric name (counters with _total) -> its sample names; the `_created` twins left out."""
    stats = EngineStats(
        num_running=0, num_waiting=0, num_blocks=2, num_free_blocks=2, prompt_tokens=0, generation_tokens=0,
        num_preemptions=0, prefix_cache_queries=0, prefix_cache_hits=0, kernel_calls={"cpu_reference": 1},
        max_loras=1, offload=OffloadStats(2, 1, 8, 1, 1, 1, 0, 0, 0, None),
    )  # fmt: skip
    metrics = Metrics("model", lambda: stats, tuple)
    metrics.learn(
        EngineReady(
            model="model", device="cpu", dtype="float32", max_model_len=8, vocab_size=8, eos_token_ids=[],
            block_size=16, num_blocks=2, kernels={},
        )
    )  # fmt: skip
    metrics.started({"imports": 1.5})
    metrics.watch_server(lambda: ServerHealth(live=True, ready=True, engine_deaths=0))
    metrics.watch_files(lambda: 0)
    metrics.watch_fine_tuning(FineTuningStats(jobs={"running": 1}, ended=Counter({"succeeded": 1})))
    metrics.watch_training(TrainingStats(calls=Counter({("Compute", "succeeded"): 1})))
    metrics.finished("stop")
    metrics.observe_http("/v1/models", "GET", 200, 0.1)
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        f"{family.name}_total" if family.type == "counter" else family.name: {sample.name for sample in family.samples}
        for family in families
        if not family.name.endswith("_created")
    }
