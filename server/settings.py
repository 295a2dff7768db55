"""The one Settings tree: what an operator may say, with vLLM's names, bounded; flags and LONGWAVE_* variables fill it
(configuration.py). Knows no request."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from server.engine.config import EngineConfig
from server.environment import PREFIX, data_home
from server.finetune.config import TrainerConfig
from server.setting_types import (
    MAX_NAME,
    ApiKeys,
    BlockSize,
    Folder,
    JsonVariables,
    KvDtype,
    LoraModules,
    ModelNames,
    Origins,
)
from server.training.config import TrainingConfig

BUNDLED_MODEL = "SmolLM2-135M-Instruct"
MAX_MODEL_LEN = 16_777_216  # tokens: the bound of every length a request or an operator may name
FINE_TUNED = "ft:"  # how the names of fine-tuned models begin
SAVED_WEIGHTS = "longwave://"  # how those of weights begin that low-level training has saved


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=False,
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        protected_namespaces=(),
        hide_input_in_errors=True,  # a key must not be printed because its neighbour is wrong
    )

    model: str = Field(
        BUNDLED_MODEL, min_length=1, max_length=4096, description="Bundled name, folder or hub id[@revision]."
    )
    served_model_name: ModelNames = Field(
        (), max_length=16, description="Names clients may ask for; replies carry the one asked for, metrics the first."
    )
    cache_dir: Folder = Field(
        None, description="Compiled kernels and the converted bundled model; default: longwave in the user's cache."
    )
    model_image_dir: Folder = Field(None, description="The bundled model as a container image ships it.")
    data_dir: Folder = Field(
        None, description="Uploaded files; default: longwave in the user's data folder (XDG_DATA_HOME)."
    )
    load_format: Literal["auto", "dummy"] = Field("auto", description="dummy: random weights of the model's shape.")
    chat_template: Folder = Field(None, description="A Jinja file, in the place of the model's own chat template.")
    default_chat_template_kwargs: JsonVariables = Field(
        {}, description='JSON, {"enable_thinking": false}: variables of the chat template where a request names none.'
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"

    host: str = Field("127.0.0.1", min_length=1, max_length=255)
    port: int = Field(8000, ge=0, le=65535, description="0: any free port.")
    api_key: ApiKeys = Field((), max_length=1024)
    allowed_origins: Origins = Field(
        (), max_length=64, description="Whose web pages may ask (CORS): https://chat.example, or * for all."
    )

    max_model_len: int | None = Field(None, ge=2, le=MAX_MODEL_LEN)
    max_num_seqs: int = Field(256, ge=1, le=4096)
    tpot_target_ms: float | None = Field(
        None,
        gt=0,
        le=60_000,
        description="Milliseconds that a step with generating requests in it may last while prompts are computed; "
        "by default 28, or three times what a step of one row takes if longer; on a CPU twice what such a step takes.",
    )
    max_num_batched_tokens: int | None = Field(
        None, ge=1, le=1_048_576, description="Most tokens of a step; 8192 on a GPU and 2048 on a CPU if not given."
    )
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    kv_cache_dtype: KvDtype = Field("auto", description="auto (the model's), bfloat16, float16, float32 or fp8.")
    kv_cache_memory_bytes: int | None = Field(None, ge=1_048_576, le=2**50)
    num_gpu_blocks_override: int | None = Field(None, ge=2, le=2**31 - 1)
    block_size: BlockSize = Field(32, ge=16, le=128, description="Tokens of a KV page: 16, 32, 64 or 128.")
    enable_prefix_caching: bool = True
    generation_config: Literal["auto", "vllm"] = Field(
        "auto", description="Sampling where a request names none: auto (generation_config.json's) or vllm (neutral)."
    )
    enforce_eager: bool = Field(False, description="Run decode steps without CUDA graphs.")
    num_speculative_tokens: int = Field(
        7, ge=0, le=64, description="Most tokens guessed at once where an answer quotes its prompt; 0: none."
    )
    prompt_lookup_max: int = Field(4, ge=1, le=64, description="Tokens that must be the same to guess on, at most.")
    prompt_lookup_min: int = Field(2, ge=1, le=64, description="Tokens that must be the same to guess on, at least.")
    kv_offload_gb: float = Field(0.0, ge=0, le=2**20, description="GiB of host memory for KV blocks given up; 0: none.")
    kv_offload_dir: Folder = Field(None, description="Where KV blocks go that host memory gives up.")
    kv_offload_disk_gb: float = Field(100.0, gt=0, le=2**20, description="GiB that they may take there.")
    max_queued_requests: int = Field(512, ge=0, le=1_000_000)
    queue_timeout: float = Field(300.0, gt=0, le=86_400, description="Seconds a request may wait for its first step.")

    enable_lora: bool = Field(False, description="Serve LoRA adapters; training of any kind does so in any case.")
    max_loras: int = Field(4, ge=1, le=256, description="Adapters of one step.")
    max_lora_rank: int = Field(16, ge=1, le=512, description="Largest rank of an adapter.")
    max_cpu_loras: int = Field(64, ge=1, le=100_000, description="Adapters loaded, in host memory.")
    lora_modules: LoraModules = Field((), max_length=1024, description="Adapters to begin with: name=folder.")
    allow_runtime_lora_updating: bool = Field(False, description="Serve /v1/load_lora_adapter and its opposite.")
    lora_dir: Folder = Field(None, description="Where /v1/load_lora_adapter may load from.")

    max_n: int = Field(8, ge=1, le=128, description="Most choices of one request.")
    max_body_bytes: int = Field(16 * 2**20, ge=1024, le=2**30)
    body_timeout: float = Field(30.0, gt=0, le=3600, description="Seconds a whole request body may take.")
    max_file_bytes: int = Field(512 * 2**20, ge=1, le=2**36, description="Largest uploaded file.")
    max_total_file_bytes: int = Field(10 * 2**30, ge=1, le=2**50, description="All uploaded files together.")
    max_files: int = Field(10_000, ge=1, le=1_000_000, description="Most uploaded files.")
    upload_timeout: float = Field(3600.0, gt=0, le=86_400, description="Seconds a whole upload may take.")
    enable_fine_tuning: bool = Field(True, description="Serve /v1/fine_tuning/jobs.")
    max_fine_tuning_jobs: int = Field(64, ge=1, le=100_000, description="Most fine-tuning jobs that have not ended.")
    max_fine_tuning_events: int = Field(
        10_000, ge=1000, le=100_000, description="Most events of a job that are kept: its first ones and the newest."
    )
    fine_tuning_retention_days: float = Field(
        365.0, ge=0, le=36_500, description="Days that ended jobs without a model are remembered; 0: for ever."
    )
    fine_tuning_max_length: int | None = Field(
        None, ge=2, le=MAX_MODEL_LEN, description="Most tokens of a training example; default: the model's positions."
    )
    fine_tuning_batch_tokens: int = Field(
        4096, ge=2, le=MAX_MODEL_LEN, description="Tokens of one forward in training: examples are packed up to it."
    )
    fine_tuning_checkpoint_every: int = Field(10, ge=1, le=1_000_000, description="Steps a crash may lose.")
    fine_tuning_max_full_parameters: int = Field(
        500_000_000, ge=0, le=2**50, description="Largest model that jobs may tune fully (training_type full); 0: none."
    )
    max_full_models: int = Field(8, ge=1, le=100_000, description="Most fully tuned models that are kept.")
    fine_tuning_deterministic: bool = Field(False, description="On a GPU too, jobs repeat bit for bit; slower.")
    training_gpu_share: float = Field(0.25, ge=0.01, le=1, description="Share of time for training beside answers.")
    enable_training: bool = Field(True, description="Serve /v1/training, the low-level calls.")
    max_training_models: int = Field(4, ge=1, le=1024, description="Most live models of low-level training.")
    max_training_call_tokens: int = Field(65_536, ge=1, le=MAX_MODEL_LEN, description="Most tokens of one such call.")
    training_idle_timeout: float = Field(
        3600.0, gt=0, le=604_800, description="Seconds without a call, then a live model is saved and unloaded."
    )
    max_saved_weights: int = Field(100, ge=1, le=100_000, description="Most saved weights of one API key.")
    header_timeout: float = Field(30.0, gt=0, le=3600, description="Seconds a connection may take to ask something.")
    ping_interval: float = Field(10.0, gt=0, le=3600, description="Seconds of silence before a stream's `:` line.")
    shutdown_timeout: float = Field(
        30.0, ge=0, le=3600, description="Seconds that running answers and other open requests get after SIGTERM."
    )
    keep_alive_on_engine_death: bool = Field(
        True, description="Stay up, and not live, when the engine died too often to be started again; or end."
    )
    log_level: Literal["critical", "error", "warning", "info", "debug"] = "info"

    @model_validator(mode="after")
    def _fits_together(self) -> "Settings":
        self.engine_config()  # the engine's own rules are checked here too, before anything starts
        if not self.served_model_name and len(self.model) > MAX_NAME:
            raise ValueError(
                f"model: requests name it so, in at most {MAX_NAME} characters; this one has {len(self.model)}: give a "
                "shorter name with --served-model-name (LONGWAVE_SERVED_MODEL_NAME)"
            )
        if (self.lora_modules or self.allow_runtime_lora_updating) and not self.enable_lora:
            raise ValueError("lora-modules and allow-runtime-lora-updating need enable-lora")
        if self.allow_runtime_lora_updating and self.lora_dir is None:
            raise ValueError("allow-runtime-lora-updating needs lora-dir, the folder that adapters may be loaded from")
        for name in self.lora_folders:
            if name in self.model_names or name.startswith((FINE_TUNED, SAVED_WEIGHTS)):
                raise ValueError(
                    f"lora-modules: {name} is the base model, or begins with {FINE_TUNED} or {SAVED_WEIGHTS}"
                )
        return self

    @property
    def serves_adapters(self) -> bool:
        return self.enable_lora or self.enable_fine_tuning or self.enable_training

    @property
    def lora_folders(self) -> dict[str, Path]:
        """By the adapter's name."""
        return {name: Path(folder).absolute() for name, _, folder in (m.partition("=") for m in self.lora_modules)}

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.served_model_name or (self.model,)

    @property
    def data_folder(self) -> Path:
        if self.data_dir is not None:
            return self.data_dir
        return data_home() / "longwave"

    def engine_config(self) -> EngineConfig:
        return EngineConfig(
            model=self.model,
            cache_dir=None if self.cache_dir is None else str(self.cache_dir),
            model_image_dir=None if self.model_image_dir is None else str(self.model_image_dir),
            load_format=self.load_format,
            dtype=self.dtype,
            device=self.device,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            tpot_target_ms=self.tpot_target_ms,
            block_size=self.block_size,
            gpu_memory_utilization=self.gpu_memory_utilization,
            kv_cache_memory_bytes=self.kv_cache_memory_bytes,
            num_gpu_blocks_override=self.num_gpu_blocks_override,
            kv_cache_dtype=self.kv_cache_dtype,
            enable_prefix_caching=self.enable_prefix_caching,
            enforce_eager=self.enforce_eager,
            kv_offload_gb=self.kv_offload_gb,
            kv_offload_dir=None if self.kv_offload_dir is None else str(self.kv_offload_dir),
            kv_offload_disk_gb=self.kv_offload_disk_gb,
            num_speculative_tokens=self.num_speculative_tokens,
            prompt_lookup_max=self.prompt_lookup_max,
            prompt_lookup_min=self.prompt_lookup_min,
            max_queued_requests=self.max_queued_requests,
            queue_timeout=self.queue_timeout,
            enable_lora=self.serves_adapters,
            max_loras=self.max_loras,
            max_lora_rank=self.max_lora_rank,
            max_cpu_loras=self.max_cpu_loras,
        )

    def trainer_config(self) -> TrainerConfig:
        return TrainerConfig(
            source=self.model,
            device=self.device,
            cache_dir=self.cache_dir,
            model_image_dir=self.model_image_dir,
            max_length=self.fine_tuning_max_length,
            micro_batch_tokens=self.fine_tuning_batch_tokens,
            checkpoint_every=self.fine_tuning_checkpoint_every,
            deterministic=self.fine_tuning_deterministic,
            max_full_parameters=self.fine_tuning_max_full_parameters,
            max_full_models=self.max_full_models,
            max_events=self.max_fine_tuning_events,
            kept_days=self.fine_tuning_retention_days,
            gpu_share=self.training_gpu_share,
            max_rank=self.max_lora_rank,
        )

    def training_config(self) -> TrainingConfig:
        return TrainingConfig(
            source=self.model,
            device=self.device,
            cache_dir=self.cache_dir,
            model_image_dir=self.model_image_dir,
            max_length=self.fine_tuning_max_length,
            micro_batch_tokens=self.fine_tuning_batch_tokens,
            max_rank=self.max_lora_rank,
            max_models=self.max_training_models,
            max_call_tokens=self.max_training_call_tokens,
            max_saved=self.max_saved_weights,
            idle_seconds=self.training_idle_timeout,
            gpu_share=self.training_gpu_share,
        )
