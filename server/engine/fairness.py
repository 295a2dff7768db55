"""Whose turn it is, between tenants: who was served least. Knows tenants by a name in bytes, and tokens; no requests.

Virtual token counters (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024): tokens served are counted
for each tenant, and a tenant that comes back after it had nothing waiting is lifted to the least of those that have, so
that idleness earns no credit. It is work-conserving: counters only order, they refuse nobody."""

from collections import Counter
from collections.abc import Collection, KeysView

INPUT_WEIGHT, OUTPUT_WEIGHT = 1, 2  # per token, as in the paper
QUANTUM = 256  # tokens served: tenants nearer to each other count as equal, and then short requests go first
MANY = 4096  # tenants remembered


class FairShare:
    def __init__(self) -> None:
        self._served: dict[bytes, float] = {}
        self._num_waiting: Counter[bytes] = Counter()
        self._last_left = b""  # the tenant whose last waiting request was admitted or ended most recently
        self._forgotten = 0.0  # what counts for a tenant that is not remembered

    def __len__(self) -> int:
        """Tenants remembered."""
        return len(self._served)

    @property
    def waiting(self) -> KeysView[bytes]:
        """Tenants with requests that wait."""
        return self._num_waiting.keys()

    def num_waiting(self, tenant: bytes) -> int:
        return self._num_waiting[tenant]

    def join(self, tenant: bytes) -> None:
        """A request of the tenant begins to wait."""
        if tenant not in self._num_waiting:
            peers = self._num_waiting.keys() - {tenant} or {self._last_left}
            self._served[tenant] = max(self.served(tenant), min(map(self.served, peers)))
            if len(self._served) > MANY:
                self._forget()
        self._num_waiting[tenant] += 1

    def leave(self, tenant: bytes) -> None:
        """A request of the tenant waits no more."""
        self._num_waiting[tenant] -= 1
        if not self._num_waiting[tenant]:
            del self._num_waiting[tenant]
            self._last_left = tenant

    def charge(self, tenant: bytes, *, inputs: int = 0, outputs: int = 0) -> None:
        """Tokens of prompts that were computed (not those found in the cache), and tokens that were generated."""
        self._served[tenant] = self.served(tenant) + INPUT_WEIGHT * inputs + OUTPUT_WEIGHT * outputs

    def served(self, tenant: bytes) -> float:
        return self._served.get(tenant, self._forgotten)

    def ranks(self, tenants: Collection[bytes]) -> dict[bytes, int]:
        """0 for those whose turn it is, more for those who were served more."""
        if len(tenants) <= 1:
            return dict.fromkeys(tenants, 0)
        least = min(map(self.served, tenants))
        return {tenant: int((self.served(tenant) - least) // QUANTUM) for tenant in tenants}

    def _forget(self) -> None:
        """Drops those with nothing waiting who were served no more than a newcomer would be lifted to."""
        level = min(map(self.served, self._num_waiting or {self._last_left}))
        self._forgotten = max(self._forgotten, level)
        self._served = {t: s for t, s in self._served.items() if t in self._num_waiting or s > self._forgotten}
