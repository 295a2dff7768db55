"""Requests that nobody has looked at: who is next. Knows tenants and lengths, no prefix cache.

Tenants take turns, so nobody's first prompt waits behind all of another's; and of a tenant, the shortest and the oldest
do: a short one is not held up by the long ones before it, nor are those for ever by short ones that keep coming."""

from bisect import bisect_left, insort

from server.engine.request import Request


class _Tenant:
    def __init__(self) -> None:
        self.oldest_first: dict[str, Request] = {}
        self.shortest_first: list[Request] = []
        self.takes_oldest = False  # next

    def next(self) -> Request:
        return next(iter(self.oldest_first.values())) if self.takes_oldest else self.shortest_first[0]


class Newcomers:
    def __init__(self) -> None:
        self._tenants: dict[bytes, _Tenant] = {}  # whose turn was last is last

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def add(self, request: Request) -> None:
        tenant = self._tenants.setdefault(request.cache_salt, _Tenant())
        tenant.oldest_first[request.request_id] = request
        insort(tenant.shortest_first, request, key=_by_length)

    def remove(self, request: Request) -> None:
        tenant = self._tenants[request.cache_salt]
        del tenant.oldest_first[request.request_id]
        del tenant.shortest_first[bisect_left(tenant.shortest_first, _by_length(request), key=_by_length)]
        if not tenant.oldest_first:
            del self._tenants[request.cache_salt]

    def next(self) -> Request:
        """There is one. It stays until it is taken."""
        return next(iter(self._tenants.values())).next()

    def take(self) -> Request:
        """The next one, which is no newcomer from here on."""
        name, tenant = next(iter(self._tenants.items()))
        request = tenant.next()
        tenant.takes_oldest = not tenant.takes_oldest
        self.remove(request)
        if tenant.oldest_first:
            self._tenants[name] = self._tenants.pop(name)
        return request


def _by_length(request: Request) -> tuple[int, int]:
    """Sort key: shortest first, and the oldest of those."""
    return len(request.token_ids), request.sequence_number
