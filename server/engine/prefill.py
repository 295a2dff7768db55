"""How prompts share a step's token budget. Knows numbers of tokens only.

Shortest remaining first, so that a short prompt never waits behind a giant one; and the oldest prompt always has a
quarter, so that a stream of short ones never stops a giant (each request becomes the oldest some day). Shares bind
only under contention: a prompt alone has the whole budget."""

from collections.abc import Sequence

from server.engine.request import Request

MIN_CHUNK = 16  # tokens: less of a long prompt costs a step more than it gives the prompt
OLDEST_SHARE = 4  # the oldest prompt has at least 1 / OLDEST_SHARE of the budget


def _reserved(oldest_remaining: int, budget: int) -> int:
    return min(oldest_remaining, -(-budget // OLDEST_SHARE))


def fits_budget(newcomer: Request, remaining: int, prefills: Sequence[Request], budget: int) -> bool:
    """Whether a waiting request would get a useful share of this step beside those that have one already."""
    if budget <= 0:
        return False
    if not prefills:
        return True
    oldest = min(prefills, key=lambda request: request.sequence_number)
    if newcomer.sequence_number < oldest.sequence_number:
        return True
    left = budget - _reserved(oldest.num_remaining, budget)
    for other in prefills:
        if other is not oldest and other.num_remaining <= remaining:
            left -= other.num_remaining
    return left >= min(remaining, MIN_CHUNK)


def share_budget(prefills: Sequence[Request], budget: int) -> list[tuple[Request, int]]:
    """Tokens for each prompt in this step; prompts without any are left out. At least one token is given."""
    oldest = min(prefills, key=lambda request: request.sequence_number)
    left = budget - _reserved(oldest.num_remaining, budget)
    shares: list[tuple[Request, int]] = []
    for request in sorted(prefills, key=lambda request: request.num_remaining):
        if request is oldest:
            continue
        count = min(request.num_remaining, left)
        if count == request.num_remaining or count >= MIN_CHUNK:
            if count > 0:
                shares.append((request, count))
            left -= count
    count = min(oldest.num_remaining, _reserved(oldest.num_remaining, budget) + left)
    shares.append((oldest, count))
    return shares
