"""Steps on the device: a StepBatch in, sampled tokens out. Knows how a step is run, not how a model is made ready for
it (runner.py)."""

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch

from models.adapters import AdapterSlots
from models.batch import SamplingParams, StepBatch, StepOutput
from models.copies import to_device
from models.cpu_threads import CpuThreads
from models.forward import PagedForward
from models.graphs import StepGraphs
from models.inputs import StepInputs, StepTensors
from models.kv_pool import KVCaches
from models.sampling import LaunchedSample, PromptScores, Sampler
from models.step_rows import StepRows
from models.step_shapes import GraphKey


class StepLauncher:
    """A slot (< max_num_seqs) belongs to one request from `add_request` to `remove_request`."""

    def __init__(
        self,
        forward: PagedForward,
        inputs: StepInputs,
        sampler: Sampler,
        adapters: AdapterSlots | None,
        *,
        on_cpu: bool,
    ) -> None:
        self.adapters = adapters
        self._forward = forward
        self._inputs = inputs
        self._sampler = sampler
        self._kv_caches: KVCaches = []  # whoever makes the launcher ready allocates them,
        self._graphs: StepGraphs | None = None  # and decides on these
        self._threads = CpuThreads(torch.get_num_threads()) if on_cpu else None
        if self._threads is not None:
            forward.call_between_layers(self._threads.look)

    def add_request(self, slot: int, sampling: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        """Raises ValueError for sampling parameters that name tokens outside of the vocabulary."""
        self._sampler.add_request(slot, sampling, prompt_token_ids)
        self._inputs.forget(slot)

    def append_known(self, slot: int, token_ids: Sequence[int]) -> None:
        """Tokens that the request had generated before it was preempted: penalties count them."""
        self._sampler.append_known(slot, token_ids)

    def remove_request(self, slot: int) -> None:
        self._sampler.remove_request(slot)
        self._inputs.forget(slot)

    def execute(self, batch: StepBatch) -> StepOutput:
        """As `launch`, and waits."""
        return self.launch(batch).collect()

    @torch.inference_mode()
    def launch(self, batch: StepBatch) -> LaunchedSample:
        """Queues the step on the device and waits for nothing, unless this CPU is the device."""
        with nullcontext() if self._threads is None else self._threads.step():
            return self._launch(batch)

    def _launch(self, batch: StepBatch) -> LaunchedSample:
        rows = StepRows.of(batch)
        try:
            key = None if self._graphs is None or batch.scored else self._graphs.key_of(batch, rows)
            if self._graphs is None or key is None or not self._graphs.record(key):
                return self._run(batch, rows)
            return self._replay(self._graphs, key, batch, rows)
        except BaseException:
            for slot in rows.slots.tolist():  # what was to be written to their tables may not have been
                self._inputs.forget(slot)
            raise

    def _run(self, batch: StepBatch, rows: StepRows, *, short: bool = False) -> LaunchedSample:
        step = self._inputs.build(batch, rows)
        if short:
            step = step.with_short_contexts()
        if self.adapters is not None:
            self.adapters.select(step.adapter_rows, step.num_adapter_slots)
        elif step.adapter_rows is not None:
            raise ValueError("a step names an adapter's slot, but this runner was made without adapters")
        if not batch.scored:
            logits = self._forward.sampled_rows(step, self._kv_caches)[: len(step.sample_slots)]
            token_ids, launched = self._sampler.launch(logits, step.sample_slots, step.sample_positions)
        else:
            logits, scores = self._score(step, batch, rows)
            token_ids, launched = self._sampler.launch(logits, step.sample_slots, step.sample_positions)
            launched.add(scores)
        self._inputs.note(step.sample_slots_on_device, token_ids)
        return launched

    def _score(self, step: StepTensors, batch: StepBatch, rows: StepRows) -> tuple[torch.Tensor, PromptScores]:
        """Logits of the samples, and what those of prompts' rows say of the tokens that follow, a few rows at a time:
        the logits of a whole chunk may be gigabytes."""
        device = step.sample_rows.device
        starts = np.cumsum(rows.lengths) - rows.lengths
        wanted = np.concatenate([starts[of.seq] + np.arange(len(of.targets)) for of in batch.scored])
        pieces = list(to_device(wanted, device).split(self._sampler.rows_per_piece))
        num_samples = len(step.sample_slots)
        samples = [step.sample_rows[:num_samples]] if num_samples else []
        scores = PromptScores(batch.scored, device)
        logits = self._forward.in_pieces(step, self._kv_caches, [*pieces, *samples])
        for _ in pieces:
            scores.add(next(logits))  # and no name keeps them: there is one piece at a time
        return next(logits) if samples else torch.empty(0, 1, device=device), scores

    def _replay(self, graphs: StepGraphs, key: GraphKey, batch: StepBatch, rows: StepRows) -> LaunchedSample:
        self._inputs.update_tables(batch, rows)
        arrays = self._inputs.arrays(batch, rows)
        slots, positions = arrays.sample_slots, arrays.sample_positions
        choice = self._sampler.choice_parameters(slots, positions)
        out = graphs.replay(key, batch.sharing.decodes, arrays, rows, *choice)
        launched = self._sampler.complete(out.logits, out.token_ids, out.finite, slots, positions)
        self._inputs.note(out.slots, out.token_ids)
        return launched

    def _logits(self, step: StepTensors, every_row: bool) -> torch.Tensor:
        forward = self._forward.every_row if every_row else self._forward.sampled_rows
        return forward(step, self._kv_caches)

    def _rehearse(self, batch: StepBatch) -> None:
        """Runs a batch of dummy sequences that sample in the most expensive way. No request may be present. Memory and
        kernels follow shapes, which are those of the whole contexts; their keys are not worth the time to read them."""
        sampling = SamplingParams(temperature=1.0, top_p=0.9, min_p=0.01, logprobs=20, seed=0)
        for seq in batch.seqs:
            self.add_request(seq.slot, sampling, [0])
        with torch.inference_mode():
            self._run(batch, StepRows.of(batch), short=not batch.sharing.prefills).collect()
        for seq in batch.seqs:
            self.remove_request(seq.slot)
