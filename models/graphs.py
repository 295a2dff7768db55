"""CUDA graphs of a runner's steps: for which shapes there are some, and which serves a step. How one is recorded is
graph_recorder's.

A step runs in the smallest graph that it fits. Decodes that share pages have graphs of their own, in which one pass
reads those pages for all of them.
"""

import gc
import logging
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from models.adapters import AdapterSlots
from models.batch import NO_ADAPTER, StepBatch
from models.graph_recorder import Forward, GraphOutput, GraphRecorder, StepGraph
from models.host_waits import HostWaitsError
from models.inputs import StepInputs
from models.shared_runs import Levels
from models.step_rows import MANY_ROWS, StepArrays, StepRows
from models.step_shapes import StepNeeds, StepShape

logger = logging.getLogger(__name__)


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
        with_sharing: bool,
        device: torch.device,
        adapters: AdapterSlots | None = None,
    ) -> None:
        """`with_sharing`: whether decodes may name shared pages, on one level."""
        self._shapes = sorted(shapes)
        most_decodes = max(shape.decodes for shape in self._shapes)
        #: Where pages that decodes share are read once: beside prompts, one graph a number of rows has to do.
        self._for_sharing = {
            shape
            for shape in self._shapes
            if with_sharing
            and shape.any_length
            and shape.decodes > 1
            and (shape.only_decodes or shape.decodes == min(most_decodes, shape.rows))
        }
        self._plain: dict[StepShape, StepGraph] = {}
        self._sharing: dict[StepShape, StepGraph] = {}
        self._adapted: dict[StepShape, StepGraph] = {}
        self._adapters = adapters
        self._without: set[tuple[StepShape, bool, bool]] = set()  # shapes for which there was no memory
        self.refusal: str | None = None  # where the model's steps wait for the device: then there are no graphs
        self._recorder = GraphRecorder(
            forward, inputs, self._shapes, max_model_len=max_model_len, device=device, adapters=adapters
        )

    def capture(self, shapes: Sequence[StepShape] | None = None) -> None:
        """Records all shapes, or some, the largest first, so that the smaller ones find its memory in the pool."""
        gc.collect()
        for shape, shares in self._kinds(sorted(self._shapes if shapes is None else shapes, reverse=True)):
            self.record(shape, shares=shares)

    def record_one(self) -> bool:
        """Records one graph more: the largest of every kind first, then those of few rows. False: there are all."""
        for shape, shares in self._kinds([*self.largest(), *self._shapes]):
            known = self._sharing if shares else self._plain
            if shape not in known and (shape, shares, False) not in self._without:
                self.record(shape, shares=shares)
                return self.refusal is None
        return False

    @torch.inference_mode()
    def record(self, shape: StepShape, *, shares: bool, adapted: bool = False) -> bool:
        """If need be (0.1 s). Returns whether the graph is there: not where it found no memory, nor for a model that
        waits for the device in the middle of a step."""
        kind = self._adapted if adapted else self._sharing if shares else self._plain
        if shape in kind:
            return True
        if self.refusal is not None or (shape, shares, adapted) in self._without:
            return False
        try:
            kind[shape] = self._recorder.record(shape, shares=shares, adapted=adapted)
        except torch.OutOfMemoryError:
            logger.warning("no memory for the graph of %s: such steps are launched kernel by kernel", shape)
            self._without.add((shape, shares, adapted))
        except HostWaitsError as error:
            logger.warning("no CUDA graphs: a step of this model waits for the GPU (%s)", error)
            self.refusal = str(error)
        return shape in kind

    def _kinds(self, shapes: Sequence[StepShape]) -> Iterator[tuple[StepShape, bool]]:
        """Each shape, and again where there is a graph of it for decodes that share pages."""
        for shape in shapes:
            yield shape, False
            if shape in self._for_sharing:
                yield shape, True

    def largest(self) -> list[StepShape]:
        """Of every kind: what is computed on the way is shared by kinds but for the pieces that memory falls into."""
        kinds = {(shape.only_decodes, shape.few_rows): shape for shape in self._shapes}  # sorted: the last one stays
        return list(kinds.values())

    def drop(self) -> None:
        for graphs in (self._plain, self._sharing, self._adapted):
            graphs.clear()
        self._recorder.drop()

    def shape_of(self, batch: StepBatch, rows: StepRows) -> StepShape | None:
        """The smallest shape that serves the step, recorded or not; None: no graph could."""
        levels, needs = batch.sharing.decodes, StepNeeds.of(rows)
        few = needs.rows - needs.decodes < needs.others * MANY_ROWS  # so they had better share what they read
        if self.refusal is not None or len(levels) > 1 or (batch.sharing.prefills and few):
            return None
        adapted = has_adapters(rows)
        if adapted and (levels or self._adapters is None):
            return None
        return next(
            (
                shape
                for shape in self._shapes
                if (not levels or shape in self._for_sharing)
                and (shape.only_decodes or not adapted)
                and shape.fits(needs)
            ),
            None,
        )

    def replay(
        self,
        shape: StepShape,
        levels: Levels,
        arrays: StepArrays,
        rows: StepRows,
        temperature: np.ndarray,
        keys: np.ndarray,
    ) -> GraphOutput:
        """One step of this shape, which is recorded; see `GraphRecorder.replay`."""
        graph = (self._adapted if has_adapters(rows) else self._sharing if levels else self._plain)[shape]
        return self._recorder.replay(graph, shape, levels, arrays, rows, temperature, keys)


def has_adapters(rows: StepRows) -> bool:
    return bool((rows.adapters != NO_ADAPTER).any())
