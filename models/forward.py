"""One forward of a Hugging Face decoder over a flattened batch and a paged cache. Knows no sampling and no requests."""

import inspect

from torch import Tensor
from transformers import PreTrainedModel

from models.inputs import StepTensors
from models.kv_pool import KVCaches


class PagedForward:
    """Keys and values travel through the attention function's keyword arguments; no Cache object, no mask."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        # A few families compute logits for every row whatever is asked.
        self._selects_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def sampled_rows(self, step: StepTensors, kv_caches: KVCaches) -> Tensor:
        """Logits of `step.sample_rows`: `[num_samples, vocab_size]`, in the model's dtype."""
        if self._selects_rows:
            return self._run(step, kv_caches, logits_to_keep=step.sample_rows)
        return self._run(step, kv_caches)[step.sample_rows]

    def every_row(self, step: StepTensors, kv_caches: KVCaches) -> Tensor:
        """Logits of all rows: `[num_tokens, vocab_size]`."""
        return self._run(step, kv_caches)

    def _run(self, step: StepTensors, kv_caches: KVCaches, **rows: Tensor) -> Tensor:
        logits: Tensor = self._model(
            input_ids=step.input_ids,
            position_ids=step.position_ids,
            use_cache=False,
            paged_metadata=step.metadata,
            kv_caches=kv_caches,
            **rows,
        ).logits
        return logits[0]
