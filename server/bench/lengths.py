"""How long prompts and answers are: distributions of token counts. Pure; knows no tokens."""

import random
from dataclasses import dataclass

MAX_SIGMA = 10.0  # a length in six is then more than e^10 times the median: nobody's are


@dataclass(frozen=True, slots=True)
class Lengths:
    """`mean` tokens always; or, with `range_ratio` r, uniform between mean (1 - r) and mean (1 + r) as in vLLM's
    benchmark; or, with `sigma`, lognormal: `mean` is then the median, sigma the deviation of the logarithm, and the
    long tail is cut at `longest`."""

    mean: int
    range_ratio: float = 0.0
    sigma: float = 0.0
    longest: int | None = None

    def __post_init__(self) -> None:
        if self.mean < 1:
            raise ValueError(f"a length is at least 1 token, not {self.mean}")
        if not 0 <= self.range_ratio < 1:
            raise ValueError(f"a range ratio is at least 0 and below 1, not {self.range_ratio}")
        if not 0 <= self.sigma <= MAX_SIGMA:
            raise ValueError(f"sigma is at least 0 and at most {MAX_SIGMA:g}, not {self.sigma}")
        if self.range_ratio and self.sigma:
            raise ValueError("lengths are uniform (a range ratio) or lognormal (a sigma), not both")
        if self.longest is not None and self.longest < 1:
            raise ValueError(f"the longest is at least 1 token, not {self.longest}")

    def draw(self, generator: random.Random) -> int:
        if self.sigma:
            count = round(generator.lognormvariate(0.0, self.sigma) * self.mean)
        else:
            reach = int(self.mean * self.range_ratio)
            count = generator.randint(self.mean - reach, self.mean + reach)
        return max(1, count if self.longest is None else min(count, self.longest))
