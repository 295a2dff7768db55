"""One forward of a Hugging Face decoder over a flattened batch and a paged cache. Knows no sampling and no requests."""

import inspect
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention_backend.jit import KernelVariant
from attention_backend.preparation import chain_kernels, layer_kernels, linear_kernels
from models.decoder_layers import decoder_layers
from models.fusing import FusedDecoder, FusionReport, NotFusedError, fuse, report
from models.inputs import StepTensors
from models.kv_pool import KVCaches


class PagedForward:
    """Fused layers for the families that have them; else the model's own modules, to whose attention function keys and
    values travel as keyword arguments: no Cache object, no mask."""

    def __init__(self, model: PreTrainedModel, *, fused: bool = True) -> None:
        """`fused=False` keeps to the modules. Fusing packs weights in place; see `models.fusing.fuse`."""
        self._model = model
        # A few families compute logits for every row whatever is asked.
        self._selects_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._decoder: FusedDecoder | None = None
        self._reason = "the modules were asked for"
        if fused:
            try:
                self._decoder = fuse(model)
            except NotFusedError as error:
                self._reason = str(error)

    def kernels(self, *, fp8_kv: bool) -> list[KernelVariant]:
        """Those of fused layers that steps would meet one after another."""
        if self._decoder is None:
            return []
        device, dtype = self._model.device, self._model.dtype
        steps = (chain.step(device) for chain in self._decoder.chains)
        linears = (step for step in self._decoder.linears() if not isinstance(step, str))
        return [
            *chain_kernels((step for step in steps if step is not None), dtype, fp8_kv=fp8_kv),
            *linear_kernels(linears, dtype, device),
            *layer_kernels(self._decoder.layer_steps(), dtype, device, fp8_kv=fp8_kv),
        ]

    @property
    def attends_in_chains(self) -> bool:
        """Whether layers' chains begin with the attention of rows of few keys."""
        device = self._model.device
        return self._decoder is not None and any(chain.attends(device) for chain in self._decoder.chains)

    @property
    def fused(self) -> FusionReport:
        """What is fused, and why the rest is not."""
        if self._decoder is None:
            return FusionReport(unfused={"model": self._reason})
        return report(self._decoder, self._model.device)

    def call_between_layers(self, call: Callable[[], None]) -> None:
        """In each forward from now on, in front of every decoder layer."""
        if self._decoder is not None:
            self._decoder.between_layers = call
        else:
            for layer in decoder_layers(self._model):
                layer.register_forward_pre_hook(lambda *_: call())

    def sampled_rows(self, step: StepTensors, kv_caches: KVCaches) -> Tensor:
        """Logits of `step.sample_rows` (None: of every row): `[num_samples, vocab_size]`, in the model's dtype."""
        return self._run(step, kv_caches, step.sample_rows)

    def every_row(self, step: StepTensors, kv_caches: KVCaches) -> Tensor:
        """Logits of all rows: `[num_tokens, vocab_size]`."""
        return self._run(step, kv_caches, None)

    def in_pieces(self, step: StepTensors, kv_caches: KVCaches, pieces: Sequence[Tensor]) -> Iterator[Tensor]:
        """Logits of each piece's rows (int64 indices, one at least), one piece after the other: `[rows, vocab_size]`.
        Fused layers run once for all. Modules, whose heads are their own, run once a piece, and write the same keys and
        values each time. The step has no `sampled`."""
        if self._decoder is not None and self._decoder.intact():
            hidden = self._decoder.hidden(step, kv_caches, torch.cat(list(pieces)))
            for part in hidden.split([len(piece) for piece in pieces]):
                yield self._decoder.head(part)
        elif self._selects_rows:
            for piece in pieces:
                yield self._run(step, kv_caches, piece)
        else:  # all of them at once, whatever is asked
            logits = self._run(step, kv_caches, None)
            for piece in pieces:
                yield logits[piece]

    def _run(self, step: StepTensors, kv_caches: KVCaches, rows: Tensor | None) -> Tensor:
        if self._decoder is not None and self._decoder.intact():
            return self._decoder.logits(step, kv_caches, rows)
        some = {}
        if rows is not None and self._selects_rows:
            # One row where none is wanted, for a quantised head may fail on no rows; and never as an int, by which
            # Gemma 4 cuts the rows of its last layers, too.
            some = {"logits_to_keep": rows if len(rows) else step.input_ids.new_zeros(1)}
        logits: Tensor = self._model(
            input_ids=step.input_ids,
            position_ids=step.position_ids,
            use_cache=False,
            paged_metadata=step.metadata,
            kv_caches=kv_caches,
            **some,
        ).logits[0]
        return logits if rows is None or (self._selects_rows and len(rows)) else logits[rows]
