"""How long a start takes, stage by stage. Knows no stage."""

import time


class Stages:
    """Seconds by name, in the order in which stages first ended."""

    def __init__(self, begin: float | None = None) -> None:
        """`begin` on time.monotonic()'s clock, which processes of one host share; now, by default."""
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic() if begin is None else begin

    def end(self, name: str) -> None:
        """The stage that began when the one before ended, or the first one. A stage in several parts is one."""
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
