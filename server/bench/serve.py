"""`longwave bench serve` from its settings to a measurement: finds the model, warms up, sends, measures. Prints nothing
but a progress bar."""

import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from server.bench.arrivals import ArrivalProcess, send_times
from server.bench.load import run_load
from server.bench.metrics import Measurement, measure
from server.bench.outcome import Outcome
from server.bench.stream_client import StreamClient
from server.bench.workload import Conversation, Turn

CONNECT_TIMEOUT = 10.0


class UnreachableError(Exception):
    """The server could not be asked at all: one sentence."""


@dataclass(frozen=True, slots=True)
class LoadShape:
    """Raises ValueError when it is none."""

    request_rate: float
    arrival_process: ArrivalProcess
    burstiness: float
    max_concurrency: int | None
    seed: int

    def __post_init__(self) -> None:
        self.send_times(0)

    def send_times(self, count: int) -> list[float]:
        random_gaps = random.Random(self.seed)
        return send_times(count, self.request_rate, self.arrival_process, self.burstiness, random_gaps)


def checked_key(key: str | None) -> str | None:
    """Raises ValueError for one that no header can hold."""
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ValueError("an API key is printable ASCII: it is sent in a header")
    return key


def first_model(base_url: str, api_key: str | None) -> str:
    """The server's first. Raises UnreachableError."""
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    url = base_url.rstrip("/").removesuffix("/v1") + "/v1/models"
    try:
        reply = httpx.get(url, headers=headers, timeout=CONNECT_TIMEOUT)
        reply.raise_for_status()
        return str(reply.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UnreachableError(f"cannot ask {url}: {error}") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise UnreachableError(f"{url} names no model: give --model") from error


async def drive(
    client: StreamClient,
    conversations: Sequence[Conversation],
    shape: LoadShape,
    *,
    warmups: Sequence[Turn],
    goodput: Mapping[str, float],
) -> tuple[Measurement, list[Outcome]]:
    """`warmups` are sent one after the other before the clock starts. Closes the client. Raises UnreachableError when
    a warm-up fails."""

    async def send(turn: Turn, planned: float) -> Outcome:
        return await client.complete(turn, planned)

    try:
        for turn in warmups:
            outcome = await client.complete(turn)
            if not outcome.completed:
                raise UnreachableError(f"a warm-up request failed: {outcome.failure} {outcome.detail}".strip())
        with _progress(sum(map(len, conversations))) as ended:
            outcomes, duration = await run_load(
                conversations,
                shape.send_times(len(conversations)),
                send,
                max_concurrency=shape.max_concurrency,
                ended=ended,
            )
    finally:
        client.close()
    return measure(outcomes, duration, goodput), outcomes


@contextmanager
def _progress(total: int) -> "Iterator[_Ended]":
    """On stderr, and only where a person looks at it."""
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=not sys.stderr.isatty(), transient=True) as progress:
        yield _Ended(progress, total)


class _Ended:
    """Called with every outcome."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total)
        self._begin = time.perf_counter()
        self._tokens = self._failed = 0

    def __call__(self, outcome: Outcome) -> None:
        self._tokens += outcome.output_tokens
        self._failed += not outcome.completed
        rate = self._tokens / (time.perf_counter() - self._begin)
        text = f"{rate:.0f} tokens/s" + (f", {self._failed} failed" if self._failed else "")
        self._progress.update(self._task, advance=1, description=text)
