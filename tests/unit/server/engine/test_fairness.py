"""Counters order tenants; idleness earns nothing; what is not needed is forgotten."""

from collections import Counter

from server.engine.fairness import MANY, QUANTUM, FairShare


def serve_in_order(fairness: FairShare, demands: dict[bytes, int], turns: int) -> Counter[bytes]:
    """Serves `demands` tokens a request, always to the first in rank, each tenant with one more request at hand."""
    served: Counter[bytes] = Counter()
    for tenant in demands:
        fairness.join(tenant)
    for _ in range(turns):
        ranks = fairness.ranks(demands.keys())
        tenant = min(demands, key=lambda name: (ranks[name], served[name]))
        fairness.charge(tenant, inputs=demands[tenant])
        served[tenant] += demands[tenant]
    return served


def test_backlogged_tenants_are_served_alike_whatever_their_requests_are() -> None:
    served = serve_in_order(FairShare(), {b"small": 100, b"large": 5000, b"middle": 1000}, 2000)
    assert max(served.values()) - min(served.values()) <= 2 * (5000 + QUANTUM)


def test_generated_tokens_count_twice() -> None:
    fairness = FairShare()
    fairness.charge(b"a", inputs=10)
    fairness.charge(b"a", outputs=10)
    assert fairness.served(b"a") == 30


def test_a_tenant_that_comes_back_has_no_credit_from_its_absence() -> None:
    fairness = FairShare()
    fairness.join(b"here")
    fairness.charge(b"here", inputs=1_000_000)
    fairness.join(b"back")
    assert fairness.ranks({b"here", b"back"}) == {b"here": 0, b"back": 0}
    fairness.charge(b"here", inputs=10 * QUANTUM)
    assert fairness.ranks({b"here", b"back"}) == {b"here": 10, b"back": 0}


def test_a_tenant_that_comes_to_an_empty_queue_stands_where_the_last_one_left() -> None:
    fairness = FairShare()
    fairness.join(b"first")
    fairness.leave(b"first")
    fairness.charge(b"first", inputs=1_000_000)  # it runs
    fairness.join(b"second")
    assert fairness.served(b"second") == 1_000_000


def test_who_was_served_more_does_not_get_rid_of_it_by_leaving() -> None:
    fairness = FairShare()
    fairness.join(b"patient")
    fairness.join(b"greedy")
    fairness.charge(b"greedy", inputs=50 * QUANTUM)
    fairness.leave(b"greedy")
    fairness.join(b"greedy")
    assert fairness.ranks({b"patient", b"greedy"})[b"greedy"] == 50


def test_tenants_with_requests_that_wait_are_known() -> None:
    fairness = FairShare()
    for tenant in (b"a", b"b", b"a"):
        fairness.join(tenant)
    fairness.leave(b"a")
    fairness.leave(b"b")
    assert set(fairness.waiting) == {b"a"}


def test_memory_is_bounded_however_many_tenants_come() -> None:
    fairness = FairShare()
    for number in range(3 * MANY):
        tenant = b"%d" % number
        fairness.join(tenant)
        fairness.charge(tenant, inputs=100)
        fairness.leave(tenant)
    assert len(fairness) <= MANY + 1
    fairness.join(b"new")
    assert fairness.ranks({b"new", b"%d" % (3 * MANY - 1)})[b"new"] == 0
