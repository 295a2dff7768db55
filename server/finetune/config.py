"""What a server's trainers are told beside their job: plain frozen data."""

from dataclasses import dataclass
from pathlib import Path

from models.training import LoraSettings
from server.finetune.records import MAX_EVENTS
from server.text.operators_template import NOTHING_SAID, OperatorsTemplate


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """What does not change from job to job."""

    source: str  # the base model: a folder, a hub id or the bundled model's name
    device: str = "auto"
    cache_dir: Path | None = None
    model_image_dir: Path | None = None
    max_length: int | None = None  # tokens an example may have; None: as many as the model has positions
    micro_batch_tokens: int = 4096
    checkpoint_every: int = 10  # steps
    deterministic: bool = False  # on a GPU too, the same bits again; a CPU gives them anyway
    max_rank: int = 16  # of the adapters that the engine serves
    max_full_parameters: int = 0  # of a model that jobs may tune fully; 0: none
    max_full_models: int = 8  # tuned fully that are kept, with the jobs that make one
    max_events: int = MAX_EVENTS  # of one job that are kept: its first ones and the newest
    kept_days: float = 365.0  # after its end that a job without a model is remembered; 0: for ever
    lease_seconds: float = 15.0
    beat_seconds: float = 3.0  # between two looks at the lease, and at what the owner wants
    silence_limit: float = 120.0  # seconds without a word from the trainer, then it counts as hung
    back_off: float = 1.0  # seconds after a first crash, twice as long after each one more
    answering_fd: int | None = None  # of the sign that answers are open; None: there is none, training never rests
    gpu_share: float = 1.0  # of the time, that training works while answers are open
    template: OperatorsTemplate = NOTHING_SAID  # of jobs that are made from now on
    worker: str = "server.finetune.worker"  # the module of the trainer process

    @property
    def default_rank(self) -> int:
        """Of a job whose request names none: one that can be served."""
        return min(LoraSettings().rank, self.max_rank)
