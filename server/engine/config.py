"""What the engine process is told when it starts: plain frozen data that crosses the process border as JSON. Reads
nothing from the environment (server.settings does) and imports no torch."""

from dataclasses import dataclass
from typing import Literal

from server.engine.tpot_target import DEFAULT_TARGETS, TpotTarget

BLOCK_SIZES = (16, 32, 64, 128)  # pages the kernels read: one page is one tile of a head
STEP_TOKENS = {"cuda": 8192, "cpu": 2048}
SMALLEST_MAX_MODEL_LEN = 2  # one prompt token, one answer token


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Names, meanings and defaults are vLLM's, where vLLM has them."""

    model: str
    cache_dir: str | None = None  # kernels and the bundled model; None: attention_backend.jit.environment's default
    model_image_dir: str | None = None  # the bundled model as a container image ships it
    load_format: Literal["auto", "dummy"] = "auto"  # dummy: random weights of the model's shape
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: int | None = None  # None: the model's own
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None  # None: by the device, see step_tokens
    tpot_target_ms: float | None = None  # of a step with decodes in it, while prompts are computed; None: by the device
    block_size: int = 32
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    kv_offload_gb: float = 0.0  # GiB of host memory for blocks that the device gives up; 0: they are lost
    kv_offload_dir: str | None = None  # where blocks go that host memory gives up
    kv_offload_disk_gb: float = 100.0  # GiB that they may take there
    enforce_eager: bool = False  # no CUDA graphs
    num_speculative_tokens: int = 7  # most guesses of a request in a step, by prompt lookup; 0: none are made
    prompt_lookup_max: int = 4  # tokens that must be the same before what followed them is guessed, at most
    prompt_lookup_min: int = 2
    max_queued_requests: int = 512
    enable_lora: bool = False
    max_loras: int = 4  # adapters in one step
    max_lora_rank: int = 16
    max_cpu_loras: int = 64  # adapters loaded, in host memory
    queue_timeout: float | None = 300.0  # seconds a request may wait for its first step; None: for ever
    runner: str = "server.engine.loading:load"  # "module:function", (EngineConfig, Stages) -> LoadedRunner

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ValueError("; ".join(problems))

    def step_tokens(self, device: str) -> int:
        """The most tokens of a step on a "cpu" or "cuda" device, of which time may leave fewer: as asked, or so many
        that more would be no faster."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(STEP_TOKENS[device], self.max_num_seqs)

    def tpot_target(self, device: str) -> TpotTarget:
        """On a "cpu" or "cuda" device: what a piece of a prompt may make others' streams wait."""
        return DEFAULT_TARGETS[device] if self.tpot_target_ms is None else TpotTarget(self.tpot_target_ms / 1000)

    def _problems(self) -> list[str]:
        checks = {
            f"block_size must be one of {BLOCK_SIZES}, not {self.block_size}": self.block_size in BLOCK_SIZES,
            "max_num_seqs must be at least 1": self.max_num_seqs >= 1,
            # Every running sequence has one token in every step, and a prompt needs at least one beside them.
            "max_num_batched_tokens must be at least max_num_seqs": self.max_num_batched_tokens is None
            or self.max_num_batched_tokens >= self.max_num_seqs,
            "gpu_memory_utilization must be above 0 and at most 1": 0 < self.gpu_memory_utilization <= 1,
            "max_loras and max_lora_rank must be at least 1": self.max_loras >= 1 and self.max_lora_rank >= 1,
            "max_cpu_loras must be at least max_loras": self.max_cpu_loras >= self.max_loras,
            "num_speculative_tokens must not be negative": self.num_speculative_tokens >= 0,
            "prompt_lookup_min must be at least 1 and at most prompt_lookup_max": 1
            <= self.prompt_lookup_min
            <= self.prompt_lookup_max,
            "max_queued_requests must not be negative": self.max_queued_requests >= 0,
            f"max_model_len must be at least {SMALLEST_MAX_MODEL_LEN}": self.max_model_len is None
            or self.max_model_len >= SMALLEST_MAX_MODEL_LEN,
            "num_gpu_blocks_override must be at least 2 (block 0 is reserved)": self.num_gpu_blocks_override is None
            or self.num_gpu_blocks_override >= 2,
            "kv_offload_gb must not be negative, kv_offload_disk_gb above 0": self.kv_offload_gb >= 0
            and self.kv_offload_disk_gb > 0,
            "kv_offload_gb needs prefix caching": self.kv_offload_gb == 0 or self.enable_prefix_caching,
            "kv_offload_dir needs kv_offload_gb: what goes to disk passes through host memory": self.kv_offload_gb > 0
            or self.kv_offload_dir is None,
            "tpot_target_ms must be above 0": self.tpot_target_ms is None or self.tpot_target_ms > 0,
            "queue_timeout must be above 0": self.queue_timeout is None or self.queue_timeout > 0,
            "runner must be 'module:function'": self.runner.count(":") == 1,
        }
        return [message for message, holds in checks.items() if not holds]
