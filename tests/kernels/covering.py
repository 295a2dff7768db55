"""Pairwise covering designs: few rows with every allowed pair of levels of two factors. Pure and deterministic."""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Row = dict[str, Any]
Pair = tuple[tuple[str, int], tuple[str, int]]
_ATTEMPTS = 25  # completions tried before a pair counts as impossible


def covering(factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool], seed: int = 0) -> list[Row]:
    """Rows over `factors`. `allowed` also judges partial rows: it must not refuse one for a missing factor."""
    rng = random.Random(seed)
    names = list(factors)
    open_pairs: dict[Pair, None] = {
        ((a, i), (b, j)): None
        for a, b in combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    rows: list[Row] = []
    while open_pairs:
        pair = next(iter(open_pairs))
        chosen = _complete(dict(pair), factors, allowed, open_pairs, rng)
        if chosen is None:
            del open_pairs[pair]
            continue
        for a, b in combinations(names, 2):
            open_pairs.pop(((a, chosen[a]), (b, chosen[b])), None)
        rows.append(_levels(chosen, factors))
    return rows


def _levels(chosen: Mapping[str, int], factors: Mapping[str, Sequence[Any]]) -> Row:
    return {name: factors[name][chosen[name]] for name in factors if name in chosen}


def _complete(
    start: dict[str, int],
    factors: Mapping[str, Sequence[Any]],
    allowed: Callable[[Row], bool],
    open_pairs: Mapping[Pair, None],
    rng: random.Random,
) -> dict[str, int] | None:
    """`start` with a level for every factor, each the one that closes most open pairs; None when none is allowed."""
    order = {name: position for position, name in enumerate(factors)}

    def gain(chosen: Mapping[str, int], name: str, level: int) -> int:
        pairs = (sorted(((other, at), (name, level)), key=lambda x: order[x[0]]) for other, at in chosen.items())
        return sum((first, second) in open_pairs for first, second in pairs)

    for _ in range(_ATTEMPTS):
        chosen = dict(start)
        rest = [name for name in factors if name not in chosen]
        rng.shuffle(rest)
        for name in rest:
            levels = list(range(len(factors[name])))
            rng.shuffle(levels)
            fits = [i for i in levels if allowed(_levels({**chosen, name: i}, factors))]
            if not fits:
                break
            chosen[name] = max(fits, key=lambda i: gain(chosen, name, i))
        if len(chosen) == len(factors) and allowed(_levels(chosen, factors)):
            return chosen
    return None
