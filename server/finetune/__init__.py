"""Fine-tuning jobs: kept in SQLite, run by a trainer process under a lease, resumed after any crash. Knows no HTTP.

Torch comes in with the trainer process only.
"""

from server.finetune.config import TrainerConfig
from server.finetune.finishing import LoadAdapter, UnloadAdapter
from server.finetune.hyperparameters import decided
from server.finetune.jobs import FineTuning
from server.finetune.journal import metrics
from server.finetune.records import Adapter, Checkpoint, Event, Hyperparameters, Job, JobRequest, Status
from server.finetune.results import checkpoint_name
from server.finetune.stats import FineTuningStats

__all__ = [
    "Adapter",
    "Checkpoint",
    "Event",
    "FineTuning",
    "FineTuningStats",
    "Hyperparameters",
    "Job",
    "JobRequest",
    "LoadAdapter",
    "Status",
    "TrainerConfig",
    "UnloadAdapter",
    "checkpoint_name",
    "decided",
    "metrics",
]
