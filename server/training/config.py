"""What a server's low-level training is bounded by, and what its process is told: plain frozen data. Imports nothing of
this room."""

from dataclasses import dataclass
from pathlib import Path

from models.training import LoraSettings


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    source: str  # the base model: a folder, a hub id or the bundled model's name
    device: str = "auto"
    cache_dir: Path | None = None
    model_image_dir: Path | None = None
    max_length: int | None = None  # tokens of one datum; None: as many as the model has positions
    micro_batch_tokens: int = 4096
    max_rank: int = 16  # of the adapters that the engine serves
    max_models: int = 4  # live ones, of all owners
    max_call_tokens: int = 65_536
    max_pending: int = 16  # calls of one model that have not ended
    max_saved: int = 100  # weights, of one owner
    idle_seconds: float = 3600.0  # without a call; then a model is saved and unloaded
    result_seconds: float = 600.0  # that results are kept
    max_results: int = 64  # of one model that are kept
    max_ended: int = 64  # models of one owner that have ended, of which is known how, and what came of their calls
    gap_seconds: float = 60.0  # that a gap in the seq_ids may last while calls wait behind it
    call_seconds: float = 1800.0  # that the process works on one call (more where it rests), then it counts as hung
    silence_limit: float = 120.0  # seconds without a word from the process, then it counts as hung
    answering_fd: int | None = None  # of the sign that answers are open; None: there is none, training never rests
    gpu_share: float = 1.0  # of the time, that training works while answers are open
    worker: str = "server.training.worker"  # the module of the process

    @property
    def default_rank(self) -> int:
        """Of a model whose request names none: one that can be served."""
        return min(LoraSettings().rank, self.max_rank)
