"""How long a step takes, predicted from what runs in it: fitted to measured steps, corrected by every further one. Pure
arithmetic: no clock, no requests, no device.

    seconds = linear(rows) + attention * pairs + chunk_read * chunk_keys + kv_read * kv_tokens + scoring * scored

linear() is piecewise linear and never falls: flat while a step does little but read weights, then one slope or another
for each size of the matrix products. chunk_read is what a chunk costs whatever its rows: next to nothing where its keys
are read while their products are computed, much where float8 pages are copied first. scoring is what the logits of a
prompt's row take, where they are asked for. The form, without those two and the steps of the first part, is that of
Sarathi-Serve and of Vidur (arXiv 2403.02310, 2405.05465)."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from server.engine.nonnegative import nonnegative_least_squares

KNOTS = (0, 64, 128, 256, 512, 1024, 2048, 4096)  # rows where linear() may turn
LARGE_STEP = 2 * KNOTS[-1]  # rows, most of them in the last piece
MEMORY_BOUND_ROWS = 32  # on a GPU a chunk of fewer rows takes as long as reading its keys: it counts as a decode
DEEP_CONTEXT = 32_768  # tokens: where rehearsals measure attention, so that they are short
#: Rows of chunks there. Where float8 pages are copied, that is 2 and 6 % of the larger two's time, which is what
#: measuring errs by, but 19 % of that of 64 rows: those tell keys from pairs.
DEEP_CHUNKS = (64, 512, 2048)
DECODES = ((1, DEEP_CONTEXT), (16, 4096), (64, 2048))  # (sequences, their tokens in the cache) in rehearsals
PRIOR_WEIGHT = 0.01  # of the shape that is assumed, against a measured step's 1: decides what no step measured
CORRECTION = 0.2  # of a step's relative error goes into the parts of its prediction
LARGEST_ERROR = 0.25  # that is believed at once: a step that was disturbed teaches little
#: Of its distance from the others a part's correction gives up in a step. Steps of a kind cannot tell the parts apart:
#: without it their errors would move time from one part to another, for ever.
RETURN = 0.02
#: Rows' time that scoring a row takes, until it was measured, and at most: where a large vocabulary is nearly all of a
#: model, or few rows are scored in a step that no graph serves.
SCORING, MOST_SCORING = 1.0, 8.0


class StepWork(NamedTuple):
    """What a step runs, in the units of the prediction."""

    rows: int = 0  # tokens through the linear layers
    pairs: int = 0  # (query, visible key) pairs of chunks
    kv_tokens: int = 0  # keys that rows of decodes read
    chunk_keys: int = 0  # keys that chunks read, each once, however many rows see it
    few_pairs: int = 0  # pairs of chunks of so few rows that a GPU only reads keys for them: not among `pairs`
    scored: int = 0  # rows of prompts that are scored

    def with_chunk(self, context: int, count: int, *, is_scored: bool = False) -> "StepWork":
        """`count` tokens of one sequence more, after `context` that are in the cache."""
        rows, keys = self.rows + count, context + count
        pairs, scored = causal_pairs(context, count), self.scored + is_scored * count
        if count < MEMORY_BOUND_ROWS:
            few_pairs = self.few_pairs + (pairs if count > 1 else 0)
            return StepWork(rows, self.pairs, self.kv_tokens + keys, self.chunk_keys, few_pairs, scored)
        return StepWork(rows, self.pairs + pairs, self.kv_tokens, self.chunk_keys + keys, self.few_pairs, scored)


def causal_pairs(context: int, count: int) -> int:
    return count * context + count * (count + 1) // 2


def work_of(chunks: Iterable[tuple[int, int]]) -> StepWork:
    """Of (tokens in the cache, tokens to run) of every sequence of a step."""
    work = StepWork()
    for context, count in chunks:
        work = work.with_chunk(context, count)
    return work


@dataclass(frozen=True, slots=True)
class StepSample:
    work: StepWork
    seconds: float


def rehearsals(max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int) -> list[list[tuple[int, int]]]:
    """Steps worth measuring once before serving, as chunks for work_of(): products of every size, attention over a deep
    context, decodes. Their sequences want pages of their own: one page read again and again would come from a cache."""
    most = min(max_num_batched_tokens, max_model_len)
    steps = [[(0, count)] for count in sorted({*(min(most, knot) for knot in KNOTS[1:]), most})]
    for count in sorted({min(count, most) for count in DEEP_CHUNKS}):
        steps.append([(min(DEEP_CONTEXT, max_model_len - count), count)])
    for num_seqs, context in DECODES:
        if num_seqs <= min(max_num_seqs, max_num_batched_tokens):
            steps.append([(min(context, max_model_len - 1), 1)] * num_seqs)
    return steps


class StepTimeModel:
    """Mutable: observe() corrects it. The engine begins with an 8B model's shape on a data-centre GPU and is soon right
    about any other, for nothing but proportions and the sum are taken on trust."""

    def __init__(
        self,
        base: float = 5e-3,
        slopes: Sequence[float] = (0.0, 0.0, 0.0, *(20e-6,) * 5),
        attention: float = 0.8e-9,
        kv_read: float = 30e-9,
        chunk_read: float = 4e-9,
        *,
        hides_reading: bool = True,
    ) -> None:
        """`base` in seconds, `slopes` in seconds a row from each of KNOTS on, the rest in seconds a pair and a key.

        A key of that 8B model is 128 KiB in bfloat16 (32 layers of 8 heads, 128 numbers for K and V each), 30 ns at 4.4
        TB/s. A chunk of MEMORY_BOUND_ROWS takes as long: 26 ns for that many pairs, and 4 ns besides. To copy float8
        pages, one byte a number read and two written, is 49 ns at 4 TB/s: whether it is done, rehearsals tell.
        `hides_reading`: products and scores are computed while weights and keys are read. Not on a CPU: there chunks of
        a few rows take time for their pairs besides.
        """
        if len(slopes) != len(KNOTS):
            raise ValueError(f"linear() has {len(KNOTS)} slopes, not {len(slopes)}")
        self._slopes = list(slopes)
        self._at_knots = [base]
        for slope, start, end in zip(slopes, KNOTS, KNOTS[1:], strict=False):
            self._at_knots.append(self._at_knots[-1] + slope * (end - start))
        self._attention = attention
        self._kv_read = kv_read
        self._chunk_read = chunk_read
        self.hides_reading = hides_reading
        self._factors = [1.0, 1.0, 1.0, 1.0]  # corrections of the four parts
        self._scoring = SCORING  # in rows of many

    @classmethod
    def fit(
        cls, samples: Iterable[StepSample], prior: "StepTimeModel | None" = None, weight: float = PRIOR_WEIGHT
    ) -> "StepTimeModel":
        """Least squares of relative errors with coefficients that are not negative. What no sample tells has the
        proportions of `prior`, one without corrections (None: the defaults), which counts `weight` of a sample."""
        samples = [sample for sample in samples if sample.seconds > 0]
        prior = cls() if prior is None else prior
        if not samples:
            return prior
        ratio = np.median([sample.seconds / prior.predict(sample.work) for sample in samples])
        assumed = np.array([prior._at_knots[0], *prior._slopes, prior._attention, prior._kv_read, prior._chunk_read])
        unit = np.where(assumed > 0, assumed, prior._slopes[-1])  # so that all unknowns are near 1
        unit[-1] = prior._kv_read  # of either kind of key: where chunks read theirs for nothing is not known
        unit *= ratio
        rows = np.array([prior._features(sample.work) for sample in samples]) * unit
        rows /= np.array([[sample.seconds] for sample in samples])
        system = np.concatenate([rows, weight * np.eye(len(unit))])
        wanted = np.concatenate([np.ones(len(samples)), weight * assumed * ratio / unit])
        found = (nonnegative_least_squares(system, wanted) * unit).tolist()
        return cls(found[0], found[1:-3], *found[-3:], hides_reading=prior.hides_reading)

    def __str__(self) -> str:
        linear, attention, kv_read, chunk_read = self._factors
        return (
            f"{1e3 * self.floor:.2f} ms a step, {1e6 * linear * self._slopes[-1]:.2f} us a row of many, "
            f"{1e9 * attention * self._attention:.3f} ns a pair of query and key, "
            f"{1e9 * kv_read * self._kv_read:.1f} ns a key of a decode, "
            f"{1e9 * chunk_read * self._chunk_read:.1f} ns a key of a chunk"
        )

    @property
    def floor(self) -> float:
        """Seconds of a step of one row: launches, and every weight read once."""
        return self.linear(1)

    def keys_read(self, keys: int) -> float:
        """Seconds that chunks which read so many keys take for that, whatever their rows."""
        return self._factors[3] * self._chunk_read * keys

    def linear(self, rows: int) -> float:
        index = bisect_right(KNOTS, rows) - 1
        return self._factors[0] * (self._at_knots[index] + self._slopes[index] * (rows - KNOTS[index]))

    def predict(self, work: StepWork) -> float:
        """Seconds."""
        seconds = sum(self._parts(work))
        return seconds + self._scoring * self._row_of_many * work.scored if work.scored else seconds

    def prompt_seconds(self, context: int, count: int, *, is_scored: bool = False) -> float:
        """What `count` further tokens of a prompt cost in large steps, that share the reading of weights and keys."""
        whole = self._row_of_many * (1 + is_scored * self._scoring)
        steps = -(-count // LARGE_STEP)
        keys = steps * context + count * (steps + 1) // 2  # of `steps` equal chunks
        pairs = self._factors[1] * self._attention * causal_pairs(context, count)
        return whole * count + pairs + self.keys_read(keys)

    def largest_chunk(self, work: StepWork, context: int, seconds: float, most: int, *, is_scored: bool = False) -> int:
        """The largest chunk after `context` tokens, of at most `most`, with which a step that does `work` already stays
        within `seconds`; 0 when there is none."""
        low, high = 0, most
        while low < high:
            middle = most if high == most and low == 0 else (low + high + 1) // 2
            if self.predict(work.with_chunk(context, middle, is_scored=is_scored)) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low

    def take_over(self, other: "StepTimeModel") -> None:
        """All that the other predicts from but for scoring, which no fit knows."""
        self.__dict__.update(other.__dict__ | {"_scoring": self._scoring})

    def observe(self, work: StepWork, seconds: float) -> None:
        """Takes a measured step: every part of the prediction is corrected as far as it had a share in it. What one
        that scores takes besides its other work is the scoring's, and teaches nothing else: no graph serves it."""
        parts = self._parts(work)
        predicted = sum(parts)
        if predicted <= 0 or seconds <= 0:
            return
        if work.scored:
            self._learn_scoring(self._row_of_many * work.scored, seconds - predicted)
            return
        error = min(LARGEST_ERROR, max(-LARGEST_ERROR, seconds / predicted - 1))
        moved = [
            factor * (1 + CORRECTION * error * part / predicted)
            for factor, part in zip(self._factors, parts, strict=True)
        ]
        mean = sum(moved) / len(moved)
        self._factors = [factor + RETURN * (mean - factor) for factor in moved]

    def _learn_scoring(self, row_seconds: float, seconds: float) -> None:
        """It took `seconds`, where the rows of a large step would have taken `row_seconds`."""
        if row_seconds > 0:  # all of a step may have been taken for attention
            measured = min(max(seconds / row_seconds, 0.0), MOST_SCORING)
            self._scoring += CORRECTION * (measured - self._scoring)

    @property
    def _row_of_many(self) -> float:
        """Seconds of linear() for a row of a large step."""
        return self.linear(LARGE_STEP) / LARGE_STEP

    def _parts(self, work: StepWork) -> tuple[float, ...]:
        """Without scoring."""
        _, attention, kv_read, _ = self._factors
        pairs, keys = attention * self._attention * self._pairs(work), kv_read * self._kv_read * work.kv_tokens
        return self.linear(work.rows), pairs, keys, self.keys_read(work.chunk_keys)

    def _pairs(self, work: StepWork) -> int:
        return work.pairs if self.hides_reading else work.pairs + work.few_pairs

    def _features(self, work: StepWork) -> list[float]:
        """Of which predict() is a linear combination: 1, rows between knots, pairs, keys of decodes and of chunks."""
        ends = (*KNOTS[1:], max(work.rows, KNOTS[-1]))
        ramps = [float(min(max(work.rows - start, 0), end - start)) for start, end in zip(KNOTS, ends, strict=True)]
        return [1.0, *ramps, float(self._pairs(work)), float(work.kv_tokens), float(work.chunk_keys)]
