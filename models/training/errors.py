"""Why a training run cannot start or go on. Messages are written for the person who started the job."""


class TrainingError(RuntimeError):
    """A run that cannot start or go on; the message says why and what to do."""


class PlanError(TrainingError, ValueError):
    """A plan that nothing could carry out as it is written."""


class ExampleError(TrainingError, ValueError):
    """Training data that cannot be learnt from. `index`: which example, counted from 0; None: all of them.
    `in_validation`: whether it is one of the validation's."""

    def __init__(self, message: str, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index
        self.in_validation = False


class CheckpointError(TrainingError):
    """A folder that cannot be read or written as a run's own."""


class OtherRunError(CheckpointError):
    """A folder whose checkpoints belong to another run: another plan, other examples, a model of another shape."""


class DiskFullError(CheckpointError):
    """There is no room for a checkpoint or the result."""


class DivergedError(TrainingError):
    """The gradient was not finite several steps in a row."""


class OutOfMemoryError(TrainingError):
    """The device has too little memory for the plan's micro-batches. `what`: the one that did not fit, and into how
    much, in words; None where nobody knows."""

    what: str | None = None


class ModelTooLargeError(OutOfMemoryError):
    """The device has too little memory for a model all of whose weights learn, whatever the micro-batches."""
