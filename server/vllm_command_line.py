"""vLLM's flags taken out of a command line, and those of them that ask for something else than Longwave does. Knows no
flag by its name (vllm_flags.py does)."""

import re
from collections import deque
from collections.abc import Container, Iterable
from typing import NamedTuple

from server.vllm_flags import FLAGS, MODEL, Flag

STATES = {"true": "on", "false": "off"}
SHORT = re.compile("-[A-Za-z]+")


class Given(NamedTuple):
    """What stands on a command line; `value` is "on" or "off" for a switch."""

    name: str
    value: str
    flag: Flag


def apart(args: Iterable[str], with_value: Container[str]) -> tuple[list[str], list[Given]]:
    """A command line without vLLM's flags, dashes for underscores in the names of the others; and vLLM's flags.
    `with_value`: those of Longwave's behind which a value stands, whatever it looks like."""
    ours: list[str] = []
    theirs: list[Given] = []
    left = deque(args)
    while left and left[0] != "--":
        arg = left.popleft()
        name, value = _split(arg)
        given = _given(name, value, left)
        if given is not None:
            theirs.append(given)
            continue
        ours.append(name + arg[len(name) :])
        if value is None and name in with_value and left:
            ours.append(left.popleft())
    return [*ours, *left], theirs


def refused(given: Iterable[Given], model: str | None = None) -> list[str]:
    """A line for each flag whose value asks for something else. `model`: None while it is not known; what has to be
    the model is accepted then."""
    lines = []
    for name, value, flag in given:
        accepted = flag.accepted if flag.accepted != MODEL else (value if model is None else model,)
        if not any(_is_same(value, one) for one in accepted):
            only = "" if flag.is_switch or not accepted else f" (accepted: {', '.join(flag.accepted)})"
            lines.append(f"{name}: {flag.instead.replace('{value}', value)}{only}")
    return list(dict.fromkeys(lines))


def _split(arg: str) -> tuple[str, str | None]:
    """A flag's name, and the value within the argument: --name=value, -tp=2, -O3; in --name.key it is still to come."""
    flag, equals, value = arg.partition("=")
    if flag.startswith("--"):
        return flag.partition(".")[0].replace("_", "-"), value if equals else None
    short = SHORT.match(arg)
    if short is None:
        return arg, None
    rest = flag[short.end() :]
    return short[0], value if equals else rest if rest and rest[0] != "." else None


def _given(name: str, value: str | None, left: deque[str]) -> Given | None:
    """Takes the values behind the flag from `left`. None if it is none of vLLM's alone."""
    flag = FLAGS.get(name)
    if flag is None:
        flag = FLAGS.get(name.replace("--no-", "--", 1))
        return Given(name, "off", flag) if flag is not None and flag.is_switch and value is None else None
    if flag.is_switch:
        if value is None and left and left[0].lower() in STATES:  # as vLLM once had it
            value = left.popleft()
        return Given(name, "on" if value is None else STATES.get(value.lower(), value), flag)
    if value is None:
        values: list[str] = []
        while left and (flag.takes_several or not values) and not left[0].startswith("--") and not SHORT.match(left[0]):
            values.append(left.popleft())
        value = " ".join(values)
    return Given(name, value, flag)


def _is_same(value: str, accepted: str) -> bool:
    try:
        return float(value) == float(accepted)
    except ValueError:
        return value == accepted
