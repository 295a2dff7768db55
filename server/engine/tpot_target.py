"""How long a step may last while others' tokens wait for it. Knows devices by name; of a step, only its time."""

from typing import NamedTuple


class TpotTarget(NamedTuple):
    """The longer of the two."""

    seconds: float = 0.0
    floors: float = 0.0  # times what a step of one row takes: all weights are read once

    def of(self, floor: float) -> float:
        """Seconds, where a step of one row takes `floor` seconds."""
        return max(self.seconds, self.floors * floor)


#: A GPU computes some hundred rows while it reads the weights, so steps of fewer give little away. On a CPU every row
#: takes its time: a chat beside a long prompt gets half of its tokens a second, and the prompt half of its own.
DEFAULT_TARGETS = {"cuda": TpotTarget(0.028, 3), "cpu": TpotTarget(0.0, 2)}
