"""When a step is launched behind the one that runs: so late that whoever comes meanwhile is in it, so early that the
device never waits for it. Pure arithmetic: no clock, no device.

A step launched as soon as the one before begins keeps a newcomer waiting for the rest of that one and for a whole one
more."""

LAUNCHES = 2  # times what launches took that a step is launched before the one in front ends,
MARGIN = 0.002  # and so many seconds more
SHORTEST = 0.001  # wait that is worth it
FORGOTTEN = 0.1  # of what launches took, with each further one: the first of a kind may load kernels, or record a graph
LEAST_DOUBT = 0.1  # of a predicted time: it may be shorter by so much
MORE_DOUBT, LESS_DOUBT = 0.2, 0.005  # after a step that ended before the next was there, and after one that did not


class LaunchTiming:
    def __init__(self) -> None:
        self._cost = 0.0
        self._doubt = LEAST_DOUBT

    def patience(self, predicted: float, elapsed: float) -> float:
        """Seconds after which the next step is to be launched; 0: at once. The one that runs does so for `elapsed`
        seconds of `predicted`."""
        wait = (1 - self._doubt) * predicted - elapsed - LAUNCHES * self._cost - MARGIN
        return wait if wait >= SHORTEST else 0.0

    def launched(self, seconds: float) -> None:
        """Scheduling and launching a step took so long."""
        self._cost = max(seconds, (1 - FORGOTTEN) * self._cost)

    def waited(self, *, too_long: bool) -> None:
        """A launch was put off; `too_long`: the device had nothing to do when it came."""
        if too_long:
            self._doubt = min(1.0, self._doubt + MORE_DOUBT)
        else:
            self._doubt = max(LEAST_DOUBT, self._doubt - LESS_DOUBT)
