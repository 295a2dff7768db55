"""Flags that take several values after one name, as vLLM's command line has them."""

from collections.abc import Iterable, Iterator

import typer
from typer.core import TyperCommand

PAIRS = "--lora-modules"


class ServeCommand(TyperCommand):
    """`--lora-modules a=x b=y`, beside a flag for each and commas between them."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        return super().parse_args(ctx, list(one_flag_each(args)))


def one_flag_each(args: Iterable[str]) -> Iterator[str]:
    """Repeats the flag in front of each further value. Only a name=value can be told from what comes behind the flag's
    values, so other flags have no such form."""
    given = 0  # arguments since the flag; 0: it is not the last
    for arg in args:
        if arg.startswith("-"):
            name, _, value = arg.partition("=")
            given = 0 if name != PAIRS else 2 if value else 1
        elif given > 1 and "=" in arg:
            yield PAIRS
        else:
            given = 2 if given == 1 else 0
        yield arg
