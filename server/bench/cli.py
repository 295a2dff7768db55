"""`longwave bench`: flags to settings, figures to table, JSON and page. Only wiring; names of flags are vLLM's."""

import asyncio
import inspect
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from server import strict_json
from server.bench.arrivals import ArrivalProcess
from server.bench.lengths import Lengths
from server.bench.metrics import METRICS, Measurement, parse_goodput
from server.bench.offline_cli import latency, throughput
from server.bench.report_html import page
from server.bench.report_json import as_json, requests_as_json
from server.bench.report_table import latency_table, notes, totals_table
from server.bench.result_files import check_writable
from server.bench.workload import Conversation, RandomPrompts, SharedDocuments, Workload

Flag = typer.Option
EXIT_FAILED = 1
EXIT_USAGE = 2

#: Flags that change nothing with another workload.
WORKLOAD_FLAGS = {
    "random": ("random_prefix_len", "num_turns"),
    "prefix_repetition": tuple(
        f"prefix_repetition_{what}" for what in ("num_prefixes", "prefix_len", "suffix_len", "output_len")
    ),
}

bench_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure a server, or the engine alone.")
bench_app.command()(latency)
bench_app.command()(throughput)


@bench_app.command()
def serve(
    base_url: Annotated[str, Flag(help="Of any OpenAI-compatible server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, Flag(help="Default: the server's first.")] = None,
    api_key: Annotated[str | None, Flag(help="Default: LONGWAVE_API_KEY.")] = None,
    num_prompts: Annotated[int, Flag(min=1, help="Requests; with --num-turns, conversations.")] = 100,
    request_rate: Annotated[float, Flag(help="Requests a second; inf: all at once.")] = float("inf"),
    arrival_process: Annotated[ArrivalProcess, Flag(help="Gaps between requests.")] = "gamma",
    burstiness: Annotated[float, Flag(help="Of gamma: 1 is Poisson, less is burstier.")] = 1.0,
    max_concurrency: Annotated[int | None, Flag(min=1, help="Most requests at once; the others wait here.")] = None,
    dataset_name: Annotated[
        Literal["random", "prefix_repetition"], Flag(help="prefix_repetition: questions on shared documents.")
    ] = "random",
    random_input_len: Annotated[int, Flag(min=1, help="Of random: tokens of a prompt, behind the prefix.")] = 1024,
    random_output_len: Annotated[int, Flag(min=1, help="Of random: tokens of an answer.")] = 128,
    random_range_ratio: Annotated[float, Flag(help="r: lengths are uniform within 1 - r and 1 + r.")] = 0.0,
    random_sigma: Annotated[float, Flag(help="Long tail: lengths are lognormal around the given ones.")] = 0.0,
    random_prefix_len: Annotated[int, Flag(min=0, help="Of random: tokens with which every prompt begins.")] = 0,
    num_turns: Annotated[int, Flag(min=1, help="Of random: requests of a conversation, one after the other.")] = 1,
    prefix_repetition_num_prefixes: Annotated[int, Flag(min=1, help="Shared documents.")] = 10,
    prefix_repetition_prefix_len: Annotated[int, Flag(min=1, help="Tokens of one.")] = 8192,
    prefix_repetition_suffix_len: Annotated[int, Flag(min=1, help="Tokens of a question.")] = 256,
    prefix_repetition_output_len: Annotated[int, Flag(min=1, help="Tokens of an answer.")] = 128,
    max_len: Annotated[int | None, Flag(min=2, help="Where long tails are cut: prompt or answer, tokens.")] = None,
    prompt_format: Annotated[Literal["token_ids", "text"], Flag(help="text needs --tokenizer.")] = "token_ids",
    tokenizer: Annotated[
        str | None, Flag(help="Bundled name, folder or hub id; used by --prompt-format text alone.")
    ] = None,
    vocab_size: Annotated[int, Flag(min=100, help="Token ids are from its upper nine tenths; not of text.")] = 10_000,
    ignore_eos: Annotated[bool, Flag(help="Answers have exactly the length that was asked for.")] = True,
    temperature: Annotated[float, Flag(min=0, max=2)] = 0.0,
    extra_body: Annotated[str, Flag(help="More fields of each request, as a JSON object.")] = "{}",
    num_warmups: Annotated[int, Flag(min=0, help="Requests before the clock starts.")] = 0,
    request_timeout: Annotated[float, Flag(min=0.001, help="Seconds one request may take.")] = 6 * 3600.0,
    seed: Annotated[int, Flag(help="Of lengths, tokens and arrivals.")] = 0,
    goodput: Annotated[list[str] | None, Flag(help="Limits in ms, such as 'ttft:500 tpot:50'.")] = None,
    percentile_metrics: Annotated[str, Flag(help="Some of ttft,tpot,itl,e2el.")] = ",".join(METRICS),
    metric_percentiles: Annotated[str, Flag(help="Such as 90,99.")] = "90,99",
    save_result: Annotated[bool, Flag("--save-result", help="Write the JSON.")] = False,
    save_detailed: Annotated[bool, Flag("--save-detailed", help="The same, with each request's times.")] = False,
    result_dir: Annotated[Path, Flag(help="Where it goes.")] = Path(),
    result_filename: Annotated[Path | None, Flag(help="Its name; implies --save-result.")] = None,
    html: Annotated[Path | None, Flag(help="Write a page with plots.")] = None,
) -> None:
    """Load on any OpenAI-compatible server's /v1/completions. Exit code 1 when a request failed."""
    from server.bench.serve import LoadShape, UnreachableError, checked_key, drive, first_model
    from server.bench.stream_client import StreamClient, Target, checked_url
    from server.client_settings import ClientSettings

    base_url = base_url if "://" in base_url else f"http://{base_url}"
    asked = {name: value for name, value in locals().items() if isinstance(value, str | int | float)}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    result: Path | None = None
    if save_result or save_detailed or result_filename is not None:
        result = result_dir / (result_filename or f"longwave-{date.replace(':', '')}.json")

    def around(length: int) -> Lengths:
        return Lengths(length, random_range_ratio, random_sigma, max_len)

    try:
        check_workload_flags(dataset_name, asked)
        metrics, percentiles = parse_metrics(percentile_metrics), parse_percentiles(metric_percentiles)
        limits = parse_goodput(goodput or [])
        workload: Workload
        if dataset_name == "random":
            sizes = around(random_input_len), around(random_output_len)
            workload = RandomPrompts(num_prompts, *sizes, random_prefix_len, num_turns)
        else:
            sizes = around(prefix_repetition_suffix_len), around(prefix_repetition_output_len)
            documents = prefix_repetition_num_prefixes, prefix_repetition_prefix_len
            workload = SharedDocuments(num_prompts, *documents, *sizes)
        draw = _drawing(vocab_size, tokenizer if prompt_format == "text" else None, prompt_format)
        conversations = draw(workload, seed)
        warmups = draw(replace(workload, count=num_warmups), f"warm-ups of {seed}")  # of no number's run
        shape = LoadShape(request_rate, arrival_process, burstiness, max_concurrency, seed)
        extra = parse_object(extra_body)
        check_writable(result)
        check_writable(html)
        checked_url(base_url)
        key = checked_key(api_key or ClientSettings().key)
        name = model or first_model(base_url, key)  # all flags make sense: from here on something is sent
        target = Target(base_url, name, key, ignore_eos, temperature, request_timeout, extra, running_usage=True)
        found, outcomes = asyncio.run(
            drive(StreamClient(target), conversations, shape, warmups=[turns[0] for turns in warmups], goodput=limits)
        )
    except (UnreachableError, ValueError) as error:
        typer.echo(f"longwave: {error}", err=True)
        raise typer.Exit(EXIT_FAILED if isinstance(error, UnreachableError) else EXIT_USAGE) from None
    show(found, metrics, percentiles)
    rate = "inf" if math.isinf(request_rate) else request_rate
    setup: dict[str, Any] = {"date": date, "model_id": name, **asked, "request_rate": rate, "goodput": limits}
    for unwanted in ("api_key", "model"):
        setup.pop(unwanted, None)
    if html is not None:
        html.write_text(page(found, outcomes, setup, metrics, percentiles))
    if result is not None:
        figures = as_json(found, setup, metrics, percentiles) | (requests_as_json(outcomes) if save_detailed else {})
        result.write_text(json.dumps(figures, indent=1) + "\n")
    raise typer.Exit(EXIT_FAILED if found.failed else 0)


def check_workload_flags(dataset_name: str, asked: Mapping[str, Any]) -> None:
    """Raises ValueError for flags of another workload."""
    usual = inspect.signature(serve).parameters
    for workload, names in WORKLOAD_FLAGS.items():
        given = [name for name in names if asked[name] != usual[name].default]
        if workload != dataset_name and given:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ValueError(f"without --dataset-name {workload} there is no {flags}")


def _drawing(
    vocab_size: int, tokenizer: str | None, prompt_format: str
) -> Callable[[Workload, int | str], list[Conversation]]:
    """How conversations are drawn: as token ids, or as texts of exact length. Raises ValueError."""
    if prompt_format == "token_ids":
        ids = range(vocab_size // 10, vocab_size)
        return lambda workload, seed: workload.conversations(ids, random.Random(seed))
    if tokenizer is None:
        raise ValueError("--prompt-format text needs --tokenizer")
    from models import descriptions, registry
    from models.errors import ModelLoadError
    from server.bench.text_prompts import ExactText

    try:
        text = ExactText(descriptions.load_tokenizer(registry.resolve(tokenizer)))
    except ModelLoadError as error:
        raise ValueError(str(error)) from error
    words = text.vocabulary
    return lambda workload, seed: [text.as_text(one) for one in workload.conversations(words, random.Random(seed))]


def show(found: Measurement, metrics: Sequence[str], percentiles: Sequence[float]) -> None:
    console = Console()
    console.print(totals_table(found))
    console.print(latency_table(found.distributions, metrics, percentiles))
    for note in notes(found):
        console.print(f"! {note}", style="yellow", markup=False, highlight=False)


def parse_metrics(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in METRICS]:
        raise ValueError(f"no metric {', '.join(unknown)}; there are {', '.join(METRICS)}")
    return names


def parse_percentiles(text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [math.nan]
    if not all(0 <= number <= 100 for number in numbers):
        raise ValueError(f"{text!r} is not a list of percentiles such as 90,99")
    return numbers


def parse_object(text: str) -> dict[str, Any]:
    try:
        found = strict_json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{text!r:.200} is not a JSON object")
    return found
