"""JSON read strictly: no NaN, no key twice. Must not know whose text it is."""

import json
from collections.abc import Callable
from typing import Any, NoReturn


def loads(
    text: str, parse_float: Callable[[str], Any] | None = None, parse_int: Callable[[str], Any] | None = None
) -> Any:
    """Raises json.JSONDecodeError for what is no JSON, another ValueError for what Python alone would let pass (and for
    numbers of endless digits), RecursionError for endless nesting. `parse_float` reads numbers that are not whole,
    `parse_int` those that are."""
    return json.loads(
        text,
        object_pairs_hook=_object,
        parse_constant=_refuse_constant,
        parse_float=parse_float,
        parse_int=parse_int,
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    read = dict(pairs)
    if len(read) != len(pairs):
        raise ValueError("an object has a key twice")
    return read


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")
