"""For which steps CUDA graphs are recorded, and which of them serves a step. Pure arithmetic: no device, no tensors.

A graph's rows are a fixed number; rows that a step has not are padding: decodes of no keys, or rows of sequences of
their own, which read the padding page."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from attention_backend.heuristics.layer_chain import MOST_KEYS, MOST_ROWS
from models.step_rows import StepRows

#: Sequences of graphs of decodes: padding is at most a third of a batch.
DECODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
#: Sequences of graphs of decodes with drafts.
DRAFTING = (1, 2, 4, 8, 16, 32, 64)
#: Rows of graphs of steps with prompts: tiles of the matrix products. Not 320, which take 5 % less than 384, nor 448,
#: which take 1.4 times as long as 512 (linears of Llama 8B's shape, an H200). More rows keep a GPU busy for longer than
#: it takes to launch them one kernel at a time.
CHUNKS = (64, 128, 192, 256, 384, 512, 640, 768, 896, 1024)
#: Decodes beside a prompt, at most, apart from max_num_seqs of them. What is not there costs next to nothing.
BESIDE = (0, 64)
PROMPTS = 16  # sequences with more than one row beside them, those of padding included
#: The same where a step has a long prompt's piece and little else, as it is while one is read beside chats: attention
#: of few sequences is laid out for one that has nearly all rows (attention_backend/heuristics/sm90_chunks.py).
FEW_PROMPTS = 3
FEW_PROMPTS_ROWS = 192  # from which on
#: Rows that take as long as half of them: the weights are read in that time.
_CHEAP_ROWS = 64


@dataclass(frozen=True, slots=True)
class StepNeeds:
    """What a step asks of a shape."""

    rows: int
    decodes: int  # sequences with one token in front
    others: int
    longest: int  # of the others
    samples: int
    all_sampled: bool  # every sequence
    most_keys: int = 0  # of a sequence

    @classmethod
    def of(cls, rows: StepRows) -> "StepNeeds":
        decodes = rows.num_decodes
        return cls(
            rows=int(rows.lengths.sum()),
            decodes=decodes,
            others=len(rows.lengths) - decodes,
            longest=int(rows.lengths[decodes:].max(initial=0)),
            samples=rows.num_samples,
            all_sampled=bool(rows.sampled.all()),
            most_keys=int(rows.totals.max(initial=0)),
        )


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """Rows exactly; of the rest, no more than."""

    rows: int
    decodes: int  # sequences of one row, in front
    others: int  # sequences behind them, those of padding rows included
    longest: int  # rows of one of those
    samples: int  # rows whose next token is wanted
    few_rows: bool = False  # others may have one row, too: all of them are so short that a decode kernel serves them
    any_length: bool = True  # or sequences of up to MOST_KEYS keys

    @property
    def sequences(self) -> int:
        return self.decodes + self.others

    @property
    def only_decodes(self) -> bool:
        """Then every row is a sequence, and a sample."""
        return self.others == 0

    @property
    def samples_alone(self) -> bool:
        """See `StepRows.samples_alone`; decodes that share pages have graphs of their own."""
        return 2 * self.samples < self.rows

    def decodes_in_front(self, decodes: int) -> int:
        """How many of a step's decodes are taken for such."""
        return 0 if self.few_rows else decodes

    def padding(self, num_rows: int) -> list[int]:
        """Rows of each sequence of padding beside `num_rows` rows."""
        whole, rest = divmod(self.rows - num_rows, max(1, self.longest))
        return [self.longest] * whole + [rest] * (rest > 0)

    def fits(self, step: StepNeeds) -> bool:
        decodes = self.decodes_in_front(step.decodes)
        if step.rows > self.rows or decodes > self.decodes or step.samples > self.samples:
            return False
        if not self.any_length and step.most_keys > MOST_KEYS:
            return False
        others = step.others + step.decodes - decodes
        if self.only_decodes:
            return others == 0 and step.all_sampled
        return step.longest <= self.longest and others + len(self.padding(step.rows)) <= self.others


@dataclass(frozen=True, slots=True, order=True)
class GraphKey:
    """What a graph is recorded for."""

    shape: StepShape
    levels: int = 0  # of prefixes within prefixes that its decodes share
    adapted: bool = False  # rows may name adapters


def sharing_keys(shapes: Sequence[StepShape], max_levels: int) -> list[GraphKey]:
    """Where pages that decodes share are read once. Beside prompts, one graph a number of rows has to do for each
    number of levels. A prefix within a prefix needs a third decode; where padding costs nothing, such steps have every
    other size only."""
    most = max(shape.decodes for shape in shapes)
    nested = {*DRAFTING, most}
    beside = [shape for shape in shapes if shape.others == PROMPTS and shape.decodes == min(most, shape.rows)]
    alone = [shape for shape in shapes if shape.only_decodes and shape.any_length]
    return [
        GraphKey(shape, levels)
        for shape in (*alone, *beside)
        for levels in range(1, min(max_levels, shape.decodes - 1) + 1)
        if levels == 1 or not shape.only_decodes or shape.rows > _CHEAP_ROWS or shape.rows in nested
    ]


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Sequences of each graph of decodes, rising."""
    return [*(size for size in DECODES if size < max_num_seqs), max_num_seqs]


def decode_shapes(max_num_seqs: int, most_keys: int = 0) -> list[StepShape]:
    """Decodes and nothing else. `most_keys`: of a sequence, where chains of layers begin with the attention of few rows
    of few keys: those have shapes of their own if others may have more."""
    sizes = decode_sizes(max_num_seqs)
    few = [size for size in sizes if size <= MOST_ROWS] if most_keys > MOST_KEYS else []
    apart = [StepShape(size, size, 0, 0, size, any_length=False) for size in few]
    return apart + [StepShape(size, size, 0, 0, size) for size in sizes]


def draft_shapes(max_num_seqs: int, max_drafts: int) -> list[StepShape]:
    """Decodes of which some have up to `max_drafts` drafts. Padding, too, lies in sequences of so few rows."""
    if max_drafts == 0:
        return []
    longest = max_drafts + 1
    sizes = (size for size in DRAFTING if size <= max_num_seqs)
    return [StepShape(size * longest, 0, 2 * size, longest, size * longest, few_rows=True) for size in sizes]


def chunk_shapes(max_num_seqs: int, max_num_batched_tokens: int) -> list[StepShape]:
    """Pieces of prompts, with decodes beside them."""

    def shapes() -> Iterator[StepShape]:
        for rows in CHUNKS:
            if rows <= max_num_batched_tokens:
                for decodes in sorted({min(limit, max_num_seqs, rows) for limit in (*BESIDE, max_num_seqs)}):
                    if rows >= FEW_PROMPTS_ROWS and decodes <= max(BESIDE):
                        yield StepShape(rows, decodes, FEW_PROMPTS, rows, decodes + FEW_PROMPTS)
                    yield StepShape(rows, decodes, PROMPTS, rows, decodes + PROMPTS)

    return list(shapes())
