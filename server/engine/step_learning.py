"""Learns how long steps take from those that people wait for, where rehearsing them would make every start longer: on a
CPU. Pure arithmetic, as step_time.py has it. Not for a GPU, whose steps record graphs and load kernels on their way."""

from collections.abc import Iterable

from server.engine.step_time import KNOTS, LARGEST_ERROR, StepSample, StepTimeModel, StepWork

#: Of the bundled model (135 million parameters in bfloat16) on two cores of an AMD EPYC, as measured: every row takes
#: time from the first one on, and attention takes much of it, as heads are small and layers narrow.
CPU_SHAPE = StepTimeModel(32e-3, [0.9e-3] * len(KNOTS), 0.5e-6, 3e-6, 4e-6, hides_reading=False)
#: What is worth measuring before anybody waits, as chunks for work_of(): both were run while the model warmed up.
FIRST_STEPS: list[list[tuple[int, int]]] = [[(0, 1)], [(0, 32)]]
SHAPE_WEIGHT = 0.1  # of those proportions, against a step's 1: steps that were disturbed say little of their parts
MOST_KINDS = 16  # of steps, of which the newest one is remembered


class LearningStepTime(StepTimeModel):
    """Remembers a step of every kind. One that took quite another time than predicted makes everything be fitted again;
    smaller errors are corrected as anywhere."""

    def __init__(self, samples: Iterable[StepSample], shape: StepTimeModel = CPU_SHAPE) -> None:
        """`samples` may be none. `shape`: the proportions of what was never measured."""
        super().__init__()
        self._shape = shape
        self._samples: dict[tuple[int, ...], StepSample] = {}  # the newest last
        for sample in samples:
            self._remember(sample)
        self._fit_again()

    def observe(self, work: StepWork, seconds: float) -> None:
        predicted = self.predict(work)
        if seconds <= 0:
            return
        if not work.scored:
            self._remember(StepSample(work, seconds))
        if not work.scored and abs(seconds - predicted) > LARGEST_ERROR * predicted:
            self._fit_again()
        else:
            super().observe(work, seconds)

    def _remember(self, sample: StepSample) -> None:
        kind = _kind(sample.work)
        self._samples.pop(kind, None)
        self._samples[kind] = sample
        if len(self._samples) > MOST_KINDS:
            del self._samples[next(iter(self._samples))]

    def _fit_again(self) -> None:
        self.take_over(StepTimeModel.fit(self._samples.values(), self._shape, SHAPE_WEIGHT))


def _kind(work: StepWork) -> tuple[int, ...]:
    """The same for steps of about as many rows that do about as much of everything else."""
    others = (work.pairs + work.few_pairs, work.kv_tokens, work.chunk_keys)
    return work.rows.bit_length(), *(number.bit_length() // 2 for number in others)
