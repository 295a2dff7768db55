"""How far a waiting request has come with its prefix in slower memory, and what a look for more of it found. Data
alone: what becomes of it is for offloading_cache.py."""

from dataclasses import dataclass, field

from server.engine.host_slots import Held
from server.engine.kv_cache import Entry


@dataclass(slots=True)
class Fetched:
    """How far into a prompt blocks were asked for: each once only, so that its request never waits for ever."""

    from_disk: int = 0
    computes_rest: bool = False  # of what is on disk
    from_host: int = 0

    @property
    def has_begun(self) -> bool:
        return self.from_disk > 0 or self.from_host > 0


@dataclass(slots=True)
class Found:
    """What continues a prompt's hits."""

    on_device: list[Entry]  # the hits too
    in_host: list[tuple[int, Held]] = field(default_factory=list)  # (index in the prompt, content): to load, pinned
    num_blocks: int = 0  # in slower tiers, or on their way from there
    is_arriving: bool = False  # some of them are on their way
    room: int | None = None  # for reads that begin in this turn; None: nobody has asked
