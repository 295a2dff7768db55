"""A burst: several requests of one tenant that wait for their first tokens at once, while nobody else is there. Knows
counts and times of requests, and no step.

Which of them is served first is luck, so those that were let the others have their first tokens soon: what longer steps
take from them now they get back when nothing waits any more. Whoever came well before the burst and has had a first
token before it, or came after it, is not of it, and nobody is while another tenant is there."""

from collections.abc import Mapping

from server.engine.request import Request

LEAST = 4  # requests that wait at once, and more than decode: a burst begins
TOGETHER = 0.5  # seconds before the first that waits, in which its own first may have come and been served already


class Burst:
    def __init__(self) -> None:
        self._tenant: bytes | None = None  # None: there is no burst
        self._came = self._began = 0.0  # when the first that waited had come; when it became a burst
        self._grew = 0.0  # when it last was one for whoever came new
        self._is_alone = False

    def look(
        self, waiting: Mapping[bytes, int], decoding: Mapping[bytes, int], first_arrival: float, now: float
    ) -> None:
        """Before each step: requests of each tenant that have no token yet, and those that have (no zeros); when the
        first of those without came. It is over when none of its requests waits any more."""
        tenants = waiting.keys() | decoding.keys()
        self._is_alone = len(tenants) == 1
        if self._tenant not in waiting or first_arrival > self._grew:
            self._tenant = None
        for tenant, count in waiting.items():
            if self._is_alone and count >= LEAST and count > decoding.get(tenant, 0):
                if self._tenant is None:
                    self._tenant, self._came, self._began = tenant, first_arrival, now
                self._grew = now

    def __contains__(self, request: Request) -> bool:
        """Whether the request waits, or has waited, in the burst that goes on, if one does."""
        if self._tenant is None or not self._is_alone:
            return False
        had_begun = 0.0 < request.first_token_time < self._began and request.arrival_time < self._came - TOGETHER
        return request.arrival_time <= self._grew and not had_begun
