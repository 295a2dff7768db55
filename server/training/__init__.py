"""Low-level training: forward_backward, optim_step, sample, one call at a time, on live models. Knows no HTTP.

Torch comes in with the training process only.
"""

from server.training.calls import (
    Call,
    Compute,
    Computed,
    Create,
    Created,
    Loaded,
    LoadWeights,
    NewModel,
    OptimStep,
    Outcome,
    PackedDatum,
    Sample,
    Sampled,
    SampledSequence,
    Saved,
    SaveWeights,
    Stepped,
    Unload,
    Unloaded,
)
from server.training.config import TrainingConfig
from server.training.futures import Future
from server.training.live import LiveModel
from server.training.stats import TrainingStats
from server.training.training import Training
from server.training.weights import SavedWeights

__all__ = [
    "Call",
    "Compute",
    "Computed",
    "Create",
    "Created",
    "Future",
    "LiveModel",
    "LoadWeights",
    "Loaded",
    "NewModel",
    "OptimStep",
    "Outcome",
    "PackedDatum",
    "Sample",
    "Sampled",
    "SampledSequence",
    "SaveWeights",
    "Saved",
    "SavedWeights",
    "Stepped",
    "Training",
    "TrainingConfig",
    "TrainingStats",
    "Unload",
    "Unloaded",
]
