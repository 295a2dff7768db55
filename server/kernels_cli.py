"""`longwave kernels`: compile the kernels ahead of time, or list them. Only wiring."""

import json
from itertools import count
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

Flag = typer.Option
EXIT_FAILED = 1

kernels_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="The CUDA kernels: compile them ahead of time, or list them."
)


def _fail(error: Exception) -> NoReturn:
    typer.echo(f"longwave: {error}", err=True)
    raise typer.Exit(EXIT_FAILED)


@kernels_app.command("build")
def build_kernels(
    arch: Annotated[str, Flag(help="all, or some: sm_80,sm_90a.")] = "all",
    out: Annotated[Path | None, Flag(help="A folder for an image; default: the user's cache.")] = None,
    jobs: Annotated[int | None, Flag(min=1, max=1024, help="Compilers at once; default: one per CPU.")] = None,
    strict: Annotated[bool, Flag(help="Fail when a hot kernel spills or is serialised.")] = False,
) -> None:
    """Compile every kernel ahead of time. Needs NVRTC and no GPU."""
    from attention_backend import jit
    from attention_backend.jit.build import build

    try:
        archs = jit.archs_named(arch)
        total = len(jit.list_variants(archs))
        number = count(1)
        results = build(archs, out, jobs, lambda result: _echo_built(result, f"[{next(number)}/{total}]"))
    except (ValueError, jit.JitError) as error:
        _fail(error)
    compiled = sum(not result.cached for result in results)
    typer.echo(f"{len(results)} kernels for {', '.join(archs)}: {compiled} compiled, {len(results) - compiled} cached")
    violations = jit.check(results)
    for violation in violations:
        typer.echo(f"warning: {violation}", err=True)
    raise typer.Exit(EXIT_FAILED if strict and violations else 0)


def _echo_built(result: Any, progress: str) -> None:
    if not result.cached:
        text = f"{progress} {result.variant}  {result.seconds:.1f} s, {result.report.registers} registers"
        typer.echo(text, err=True)


@kernels_app.command("list")
def list_kernels(
    arch: Annotated[str, Flag(help="all, or some: sm_80,sm_90a.")] = "all",
    as_json: Annotated[bool, Flag("--json", help="For programs.")] = False,
) -> None:
    """Every kernel that a call could need, and whether it is compiled already."""
    from attention_backend import jit

    try:
        variants = jit.list_variants(jit.archs_named(arch))
        cache = jit.default_cache()
        rows = [(variant, cache.find(variant)) for variant in variants]
    except (ValueError, jit.JitError) as error:
        _fail(error)
    if as_json:
        typer.echo(json.dumps([{"kernel": str(variant), "compiled": found is not None} for variant, found in rows]))
        return
    for variant, found in rows:
        state = f"compiled, {found.report.registers} registers" if found else "not compiled"
        typer.echo(f"{variant}  {state}")
