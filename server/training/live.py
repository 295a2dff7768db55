"""One live model as the API process knows it: whose it is, its calls, how far it is, how it ended. Does nothing."""

import time

from server.errors import LongwaveError, TrainingMissing, TrainingModelLost
from server.training.calls import Create, Saved
from server.training.config import TrainingConfig
from server.training.futures import CallSequence, Future


class LiveModel:
    def __init__(
        self, model_id: str, owner: str, salt: bytes, base_model: str, create: Create, config: TrainingConfig
    ) -> None:
        self.id = model_id
        self.owner = owner
        self.salt = salt  # of the owner's prefix cache
        self.base_model = base_model  # the name it was asked for by
        self.create = create
        self.created_at = int(time.time())
        self.creating = Future(model_id, 0, create)
        self.sequence = CallSequence(model_id, max_pending=config.max_pending, max_results=config.max_results)
        self.steps = 0
        self.version = 0  # of its weights
        self._saved: dict[str, Saved] = {}  # by its path, the newest last
        self.last_used = time.monotonic()
        self.end: LongwaveError | None = None  # what every later call is told
        self.ended_at = 0.0

    def find(self, seq_id: int) -> Future | None:
        return self.creating if seq_id == 0 else self.sequence.find(seq_id)

    @property
    def is_idle(self) -> bool:
        return self.creating.outcome is not None and not self.sequence.pending

    def finish(self, error: LongwaveError) -> None:
        """It is live no longer, and what has not ended fails."""
        if self.end is None:
            self.end, self.ended_at = error, time.monotonic()
        self.creating.end(error)
        self.sequence.fail(error)

    def remember(self, saved: Saved) -> None:
        self._saved.pop(saved.path, None)
        self._saved[saved.path] = saved

    def forget(self, path: str) -> None:
        """Saved weights that are deleted, of this model or of another."""
        self._saved.pop(path, None)

    @property
    def last_saved(self) -> Saved | None:
        """The best place to go on from after a crash: the newest, but rather one with the optimiser's state."""
        newest = list(reversed(self._saved.values()))
        return next((saved for saved in newest if saved.kind == "weights"), newest[0] if newest else None)

    def lost(self, reason: str) -> TrainingModelLost:
        """`reason`: a sentence without its full stop."""
        return TrainingModelLost(f"{reason}, and the model {self.id} is lost with it. {self.way_on}")

    def unsaved(self) -> TrainingMissing:
        return TrainingMissing(
            f"The model {self.id} was unloaded, and its weights could not be saved. {self.way_on}", param="model_id"
        )

    @property
    def way_on(self) -> str:
        """For whoever has lost it: sentences."""
        saved = self.last_saved
        if saved is None:
            return "Nothing of it was saved: create a model and begin anew."
        return (
            f"Its weights after optimiser step {saved.steps} are saved: create a model with the same "
            f"lora_config and load_weights from {saved.path}."
        )
