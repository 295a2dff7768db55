"""A room that tenants share: when it is full, one with less than an equal part of it still gets more, so that nobody
shuts others out by being many. Knows neither what is held nor who holds it.

k of them together hold at most 1 + 1/2 + ... + 1/k times the room."""

from collections import Counter


class EqualParts:
    """Counts only, and has no lock: whoever may not hold more asks first."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._held: Counter[str | bytes] = Counter()  # by each tenant that holds any

    @property
    def held(self) -> int:
        """By all together."""
        return self._held.total()

    def has_room(self, tenant: str | bytes, more: int) -> bool:
        if not more or self.held + more <= self._room:
            return True
        return self._held[tenant] + more <= self._room // len({*self._held, tenant})

    def hold(self, tenant: str | bytes, more: int) -> None:
        """Whether there is room or not; less than nothing gives back."""
        self._held[tenant] += more
        if not self._held[tenant]:
            del self._held[tenant]
