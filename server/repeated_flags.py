"""Flags that take several values after one name, as vLLM's command line has them, and flags of vLLM's alone."""

from collections.abc import Iterable, Iterator

import typer
from typer.core import TyperCommand

from server.vllm_command_line import apart

PAIRS = "--lora-modules"


class ServeCommand(TyperCommand):
    """`--lora-modules a=x b=y`, beside a flag for each and commas between them. vLLM's flags become `ctx.obj`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        with_value = {name for option in self.params if not getattr(option, "is_flag", True) for name in option.opts}
        ours, ctx.obj = apart(args, with_value)
        return super().parse_args(ctx, list(one_flag_each(ours)))


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
