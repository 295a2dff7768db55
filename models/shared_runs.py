"""Which sequences of a step begin with the same pages, as the scheduler tells the runner, and what the runner wants to
be told."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SharedRun:
    """Sequences `first` to `end - 1` of their part of a step have the same blocks at places `start` to `stop - 1` of
    their tables, and at all places before."""

    first: int
    end: int
    start: int
    stop: int


#: A level's runs follow one another, and each lies within one run of the level before it and starts where that stops.
Levels = tuple[tuple[SharedRun, ...], ...]


@dataclass(frozen=True, slots=True)
class StepSharing:
    """Levels of the sequences with one token, and of the others. Sequences are counted from the first of their part."""

    decodes: Levels = ()
    prefills: Levels = ()


NOT_SHARED = StepSharing()

#: Of an engine's steps, as documents that begin with the same instructions: CUDA graphs are recorded for each number.
MOST_LEVELS = 2


@dataclass(frozen=True, slots=True)
class SharingLimits:
    """When reading shared pages once is worth it (attention_backend.heuristics.prefix)."""

    least_saved_blocks: int  # that a level must save its rows from reading, in every step
    max_levels: int = 1
    tile_rows: int = 32  # query rows that read a block together; twice as many read it twice
    max_group_rows: int = 0  # query rows of a group that a kernel takes; 0: any number
    prefills: bool = True  # whether sequences of several rows share, too
