"""Whether somebody who ought to speak has not for long. Knows no process."""

import asyncio
from collections.abc import Callable

MAX_SILENCE = 600.0  # seconds: no step takes that long, and whoever watches the liveness probe comes first
LOOKS = 12


async def until_silent(last_word: Callable[[], float | None], limit: float) -> None:
    """Returns when `last_word` has been the same for `limit` seconds; None: nobody ought to speak. Looks count, not the
    clock: this process may have stood still itself, with words unread."""
    num_same, before = 0, None
    while num_same < LOOKS:
        await asyncio.sleep(limit / LOOKS)
        now = last_word()
        num_same = num_same + 1 if now is not None and now == before else 0
        before = now
