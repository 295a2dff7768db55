"""CUDA graphs of a runner's steps: for which shapes there are some, and which serves a step. How one is recorded is
graph_recorder's.

A step runs in the smallest graph that it fits. Decodes that share pages have graphs of their own, in which one pass a
level reads those pages for all of them.
"""

import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from models.adapters import AdapterSlots
from models.batch import NO_ADAPTER, StepBatch
from models.graph_recorder import Forward, GraphOutput, GraphRecorder, StepGraph
from models.host_waits import HostWaitsError
from models.inputs import StepInputs
from models.shared_runs import Levels
from models.step_rows import MANY_ROWS, StepArrays, StepRows
from models.step_shapes import GraphKey, StepNeeds, StepShape, sharing_keys

logger = logging.getLogger(__name__)

FIRST_WAIT, LONGEST_WAIT = 60.0, 3600.0  # seconds until a graph for which there was no memory is tried again


class StepGraphs:
    """Graphs of a runner's steps. One is recorded when a step first wants it, unless it was in a quiet moment before;
    those of decodes with adapters are never recorded earlier."""

    def __init__(
        self,
        forward: Forward,
        inputs: StepInputs,
        shapes: Sequence[StepShape],
        *,
        max_model_len: int,
        max_levels: int,
        device: torch.device,
        adapters: AdapterSlots | None = None,
        clock: Callable[[], float] = time.monotonic,
        around_recordings: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`max_levels`: of prefixes within prefixes that decodes may share; 0: they share no pages. `clock`: in
        seconds. `around_recordings`: each of them empties torch's cache."""
        self._shapes = sorted(shapes)
        sharing = sharing_keys(self._shapes, max_levels)
        #: All but those of adapters.
        self._keys = sorted([*map(GraphKey, self._shapes), *sharing])
        self._with_levels = [[key.shape for key in self._keys if key.levels == n] for n in range(max_levels + 1)]
        self._recorded: dict[GraphKey, StepGraph] = {}
        self._adapters = adapters
        self._without: Counter[GraphKey] = Counter()  # how often there was no memory for it
        self._clock = clock
        self._around_recordings = around_recordings
        self._wait = FIRST_WAIT  # twice as long after each time that it was in vain, for all of them
        self._again = 0.0  # when one of them may be tried, on the clock
        self.refusal: str | None = None  # where the model's steps wait for the device: then there are no graphs
        self._recorder = GraphRecorder(
            forward, inputs, self._shapes, max_model_len=max_model_len, device=device, adapters=adapters
        )

    def capture(self, keys: Sequence[GraphKey] | None = None) -> None:
        """Records all graphs, or some, the largest first, so that the smaller ones find its memory in the pool."""
        gc.collect()
        with self._around_recordings():
            for key in sorted(self._keys if keys is None else keys, key=_shape, reverse=True):
                if self._is_to_be_tried(key):
                    self._try(key)

    def record_one(self) -> bool:
        """Records one graph more: the largest of every kind first, then those of few rows, and of one level before
        those of several; then one for which there was no memory, where it is time. False: nothing is to be done now."""
        for key in [*self.largest(), *sorted(self._keys, key=_in_turn)]:
            if key not in self._recorded and key not in self._without:
                self.record(key)
                return self.refusal is None
        if not self._without or self.refusal is not None or self._clock() < self._again:
            return False
        with self._around_recordings():
            self._try(min(self._without, key=self._without.__getitem__))  # how often each was tried
        return True

    @property
    def num_missing(self) -> int:
        """Graphs for which there was no memory."""
        return len(self._without)

    def record(self, key: GraphKey) -> bool:
        """If need be (0.1 s). Returns whether the graph is there: not where it found no memory (somebody may give some
        back: one of those is tried again after a while, for a step only where no moment was quiet for as long again),
        nor for a model that waits for the device in the middle of a step."""
        if self._is_to_be_tried(key):
            with self._around_recordings():
                self._try(key)
        return key in self._recorded

    def _is_to_be_tried(self, key: GraphKey) -> bool:
        if key in self._recorded or self.refusal is not None:
            return False
        return key not in self._without or self._clock() >= self._again + self._wait

    @torch.inference_mode()
    def _try(self, key: GraphKey) -> None:
        try:
            self._recorded[key] = self._recorder.record(key)
            if key in self._without:
                logger.info("there is memory again: the graph of %s is recorded", key)
                del self._without[key]
                self._again, self._wait = self._clock() - FIRST_WAIT, FIRST_WAIT
        except torch.OutOfMemoryError:
            self._set_back(key)
        except HostWaitsError as error:
            logger.warning("no CUDA graphs: a step of this model waits for the GPU (%s)", error)
            self.refusal = str(error)

    def _set_back(self, key: GraphKey) -> None:
        if key in self._without:
            self._wait = min(2 * self._wait, LONGEST_WAIT)
        self._without[key] += 1
        self._again = self._clock() + self._wait
        logger.warning(
            "no memory for the graph of %s (time %d, %d graphs are missing): such steps are launched kernel by kernel; "
            "one is tried again after %.0f s",
            key, self._without[key], len(self._without), self._wait,
        )  # fmt: skip

    def largest(self) -> list[GraphKey]:
        """Of every kind: what is computed on the way is shared by kinds but for the pieces that memory falls into.
        Graphs of decodes that share are of one kind whatever their levels: the most take most."""
        kinds = {(key.shape.only_decodes, key.shape.few_rows, key.levels > 0): key for key in self._keys}
        return list(kinds.values())  # sorted: the last one stayed

    def drop(self) -> None:
        self._recorded.clear()
        self._recorder.drop()

    def key_of(self, batch: StepBatch, rows: StepRows) -> GraphKey | None:
        """The smallest graph that serves the step, recorded or not; None: none could."""
        levels, needs = len(batch.sharing.decodes), StepNeeds.of(rows)
        few = needs.rows - needs.decodes < needs.others * MANY_ROWS  # so they had better share what they read
        if self.refusal is not None or levels >= len(self._with_levels) or (batch.sharing.prefills and few):
            return None
        adapted = bool((rows.adapters != NO_ADAPTER).any())
        if adapted and (levels or self._adapters is None):
            return None
        for shape in self._with_levels[levels]:
            if (shape.only_decodes or not adapted) and shape.fits(needs):
                return GraphKey(shape, levels, adapted)
        return None

    def replay(
        self,
        key: GraphKey,
        levels: Levels,
        arrays: StepArrays,
        rows: StepRows,
        temperature: np.ndarray,
        keys: np.ndarray,
    ) -> GraphOutput:
        """One step in this graph, which is recorded; see `GraphRecorder.replay`."""
        return self._recorder.replay(self._recorded[key], key.shape, levels, arrays, rows, temperature, keys)


def _shape(key: GraphKey) -> StepShape:
    return key.shape


def _in_turn(key: GraphKey) -> tuple[bool, GraphKey]:
    return key.levels > 1, key
