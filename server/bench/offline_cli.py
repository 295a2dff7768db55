"""`longwave bench latency` and `throughput`: the engine without HTTP. Only wiring; names of flags are vLLM's."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from server.bench.report_json import as_json
from server.bench.report_table import latency_table, notes, totals_table
from server.bench.result_files import check_writable
from server.configuration import ConfigurationError, load_settings

if TYPE_CHECKING:
    from server.bench.offline import OfflineEngine
    from server.bench.outcome import Outcome

Flag = typer.Option
EXIT_FAILED = 1
EXIT_USAGE = 2
METRICS = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (10.0, 90.0, 99.0)

OutputJson = Annotated[Path | None, Flag(help="Write the figures.")]
VocabSize = Annotated[int, Flag(min=100, help="Token ids are drawn from the upper nine tenths of it.")]
Seed = Annotated[int, Flag(help="Of the prompts.")]


def _engine_flags(
    *,
    model: Annotated[str | None, Flag(help="Bundled name, folder or hub id; default: the bundled model.")] = None,
    load_format: Annotated[str | None, Flag(help="auto, or dummy: random weights.")] = None,
    dtype: Annotated[str | None, Flag(help="auto, bfloat16, float16 or float32.")] = None,
    device: Annotated[str | None, Flag(help="auto, cpu or cuda.")] = None,
    max_model_len: Annotated[int | None, Flag(help="Longest prompt and answer together, in tokens.")] = None,
    max_num_seqs: Annotated[int | None, Flag(help="Most sequences of one step.")] = None,
    max_num_batched_tokens: Annotated[int | None, Flag(help="Most tokens of one step.")] = None,
    gpu_memory_utilization: Annotated[float | None, Flag(help="Share of the GPU's memory to use.")] = None,
    kv_cache_dtype: Annotated[str | None, Flag(help="As of `longwave serve`.")] = None,
    enable_prefix_caching: Annotated[bool | None, Flag(help="Keep and share the KV of common beginnings.")] = None,
) -> dict[str, Any]:
    """Those of the engine's settings that were given."""
    return {name: value for name, value in locals().items() if value is not None}


def _on_an_engine(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the flags of `_engine_flags` behind its own; what was given of them comes as `engine_flags`."""
    own = [flag for flag in signature(command).parameters.values() if flag.name != "engine_flags"]
    shared = signature(_engine_flags).parameters

    @wraps(command)
    def called(**given: Any) -> None:
        engine_flags = _engine_flags(**{name: given.pop(name) for name in shared})
        command(**given, engine_flags=engine_flags)

    flags = [flag.replace(kind=Parameter.KEYWORD_ONLY) for flag in (*own, *shared.values())]
    called.__signature__ = Signature(flags)  # type: ignore[attr-defined]  # typer reads it
    called.__annotations__ = {flag.name: flag.annotation for flag in flags}
    return called


@_on_an_engine
def latency(
    input_len: Annotated[int, Flag(min=1, help="Tokens of each prompt.")] = 32,
    output_len: Annotated[int, Flag(min=1, help="Tokens of each answer.")] = 128,
    batch_size: Annotated[int, Flag(min=1, help="Requests at once.")] = 8,
    num_iters_warmup: Annotated[int, Flag(min=0, help="Batches before the clock starts.")] = 3,
    num_iters: Annotated[int, Flag(min=1, help="Batches that are measured.")] = 10,
    vocab_size: VocabSize = 10_000,
    seed: Seed = 0,
    output_json: OutputJson = None,
    *,
    engine_flags: dict[str, Any],
) -> None:
    """One batch again and again in the engine alone: time to first token, per token, and in all."""
    asked = locals()

    async def measure(engine: "OfflineEngine") -> "tuple[list[Outcome], float]":
        from server.bench.offline import batches

        sizes = (batch_size, input_len, output_len)
        await batches(engine, num_iters_warmup, *sizes, vocab_size, -1 - seed)
        return await batches(engine, num_iters, *sizes, vocab_size, seed)

    _report(measure, asked, output_json, engine_flags)


@_on_an_engine
def throughput(
    input_len: Annotated[int, Flag(min=1, help="Tokens of each prompt.")] = 1024,
    output_len: Annotated[int, Flag(min=1, help="Tokens of each answer.")] = 128,
    num_prompts: Annotated[int, Flag(min=1, help="Requests, all at once.")] = 100,
    vocab_size: VocabSize = 10_000,
    seed: Seed = 0,
    output_json: OutputJson = None,
    *,
    engine_flags: dict[str, Any],
) -> None:
    """Many requests at once in the engine alone: tokens a second."""
    asked = locals()

    async def measure(engine: "OfflineEngine") -> "tuple[list[Outcome], float]":
        from server.bench.offline import batches

        engine.check(input_len, output_len, vocab_size)
        await batches(engine, 1, 1, input_len, min(2, output_len), vocab_size, -1 - seed)
        return await batches(engine, 1, num_prompts, input_len, output_len, vocab_size, seed)

    _report(measure, asked, output_json, engine_flags)


Measure = Callable[["OfflineEngine"], "Coroutine[Any, Any, tuple[list[Outcome], float]]"]


def _report(measure: Measure, asked: dict[str, Any], output_json: Path | None, engine_flags: dict[str, Any]) -> None:
    from server.bench import metrics
    from server.bench.offline import offline_engine
    from server.errors import EngineUnavailable

    try:
        settings = load_settings(engine_flags)
    except ConfigurationError as error:
        for problem in error.problems:
            typer.echo(f"longwave: {problem}", err=True)
        raise typer.Exit(error.exit_code) from None
    try:
        check_writable(output_json)
    except ValueError as error:
        typer.echo(f"longwave: {error}", err=True)
        raise typer.Exit(EXIT_USAGE) from None

    async def run() -> "tuple[list[Outcome], float]":
        async with offline_engine(settings.engine_config()) as engine:
            return await measure(engine)

    try:
        outcomes, seconds = asyncio.run(run())
    except (EngineUnavailable, ValueError) as error:
        typer.echo(f"longwave: {error}", err=True)
        raise typer.Exit(EXIT_FAILED if isinstance(error, EngineUnavailable) else EXIT_USAGE) from None
    found = metrics.measure(outcomes, seconds, {})
    console = Console()
    console.print(totals_table(found))
    console.print(latency_table(found.distributions, METRICS, PERCENTILES))
    for note in notes(found):
        console.print(f"! {note}", style="yellow", markup=False, highlight=False)
    if output_json is not None:
        setup = {name: value for name, value in asked.items() if isinstance(value, str | int | float)}
        setup |= engine_flags | {"model": settings.model}
        output_json.write_text(json.dumps(as_json(found, setup, METRICS, PERCENTILES), indent=1) + "\n")
    raise typer.Exit(EXIT_FAILED if found.failed else 0)
