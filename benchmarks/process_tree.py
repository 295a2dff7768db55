"""Processes, and those that come from them, by /proc/PID/stat: not every kernel lists children. Knows no server."""

from pathlib import Path


def children(pid: int) -> list[int]:
    return [other for other, (parent, _) in _processes().items() if parent == pid]


def family(pid: int) -> list[int]:
    """A process and all that come from it."""
    processes = _processes()
    found = [pid]
    for one in found:
        found += [other for other, (parent, _) in processes.items() if parent == one]
    return found


def zombies(pid: int) -> int:
    """Children that have ended and that nobody has asked for their end."""
    return sum(parent == pid and state == "Z" for parent, state in _processes().values())


def _processes() -> dict[int, tuple[int, str]]:
    """Each one's parent and state."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it ended meanwhile
            continue
        found[int(path.parent.name)] = (int(parent), state)
    return found
