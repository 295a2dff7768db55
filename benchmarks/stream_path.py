"""What the HTTP path costs beside the engine alone: many prompts at once through the whole server, and through the
engine's client, in turn, on an engine whose steps take a GPU's time and compute nothing (paced_engine.py).

    python -m benchmarks.stream_path --out results.json

Of each round: the seconds until the last answer ended, chunks a second, when the first and the median first token came,
and the CPU microseconds of a token in the process of the server, of the engine and of the client.
"""

import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import machine, model_folder
from benchmarks.arguments import write_out
from benchmarks.paced_engine import FIRST_TOKEN, PACE, engine_config
from benchmarks.process_tree import children
from benchmarks.started_server import started
from server.bench.offline import offline_engine
from server.bench.outcome import Outcome
from server.bench.stream_client import StreamClient, Target
from server.bench.workload import Turn
from server.engine.config import EngineConfig

Row = dict[str, Any]
Flag = typer.Option
TICK = os.sysconf("SC_CLK_TCK")
#: (tokens of each prompt, of each answer): what the serving cases ask, and answers that are nothing but a stream.
CASES = {"prompts": (1024, 128), "streams": (16, 512)}


@dataclass(frozen=True, slots=True)
class Way:
    name: str
    complete: Callable[[Turn], Awaitable[Outcome]]
    processes: dict[str, int]  # their ids


def write_folder(folder: Path, vocabulary: str, slower: float) -> Path:
    """`vocabulary`: "bytes", whose tokens are bytes as Llama's are, or "words", which are decoded in windows."""
    model_folder.write(folder, **model_folder.TINY | {"vocab_size": 32_000})
    (folder / PACE).write_text(json.dumps({"slower": slower}))
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    if vocabulary == "bytes":
        tokenizer["decoder"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    path.write_text(json.dumps(tokenizer))
    return folder


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


async def together(way: Way, turns: list[Turn]) -> Row:
    """All turns at once. Raises RuntimeError when one fails."""
    before = {name: cpu_seconds(pid) for name, pid in way.processes.items()}
    begin = time.perf_counter()
    outcomes = await asyncio.gather(*(way.complete(turn) for turn in turns))
    seconds = time.perf_counter() - begin
    if failed := [outcome for outcome in outcomes if not outcome.completed]:
        raise RuntimeError(f"{len(failed)} failed: {failed[0].failure} {failed[0].detail}")
    tokens = sum(turn.max_tokens for turn in turns)
    firsts = sorted(outcome.chunks[0][0] - begin for outcome in outcomes)
    cpu = {name: round(1e6 * (cpu_seconds(pid) - before[name]) / tokens, 1) for name, pid in way.processes.items()}
    return {
        "way": way.name,
        "s": round(seconds, 3),
        "tokens_per_s": round(tokens / seconds),
        "tokens": sum(outcome.output_tokens for outcome in outcomes),
        "chunks": sum(len(outcome.chunks) for outcome in outcomes),
        "first_token_s": round(firsts[0], 3),
        "ttft_p50_s": round(statistics.median(firsts), 3),
        "cpu_us_a_token": cpu,
    }


def prompts(generator: random.Random, streams: int, prompt: int, tokens: int) -> list[Turn]:
    return [Turn(generator.choices(range(FIRST_TOKEN, 32_000), k=prompt), prompt, tokens) for _ in range(streams)]


async def measure(
    folder: Path, url: str, server: int, rounds: int, turns: Callable[[], list[Turn]], show: Callable[[Row], None]
) -> list[Row]:
    """Both ways in each round; which goes first changes from round to round."""
    rows: list[Row] = []
    http = StreamClient(Target(url, str(folder)))
    before = set(children(os.getpid()))
    async with offline_engine(engine_config(EngineConfig(model=str(folder), device="cpu"))) as engine:
        own = {"client": os.getpid(), "engine": (set(children(os.getpid())) - before).pop()}
        other = {"client": os.getpid(), "server": server, "engine": children(server).pop()}
        ways = [Way("alone", engine.complete, own), Way("http", http.complete, other)]
        for way in ways:  # first calls are not measured
            await together(way, turns()[:8])
        for number in range(rounds):
            for way in ways if number % 2 else reversed(ways):
                rows.append(await together(way, turns()))
                show(rows[-1])
    http.close()
    return rows


def summary(rows: list[Row]) -> Row:
    """Medians, and how many times the engine's own tokens a second came through HTTP."""
    found: Row = {}
    for way in ("alone", "http"):
        mine = [row for row in rows if row["way"] == way]
        found[way] = {
            name: statistics.median(row[name] for row in mine)
            for name in ("s", "tokens_per_s", "first_token_s", "ttft_p50_s")
        }
        found[way]["cpu_us_a_token"] = {
            name: statistics.median(row["cpu_us_a_token"][name] for row in mine) for name in mine[0]["cpu_us_a_token"]
        }
    found["http_of_alone"] = round(found["alone"]["s"] / found["http"]["s"], 3)
    return found


def main(
    cases: Annotated[str, Flag(help=f"Some of {','.join(CASES)}.")] = ",".join(CASES),
    streams: Annotated[int, Flag(min=8, max=256)] = 256,
    rounds: Annotated[int, Flag(min=1, max=100)] = 5,
    slower: Annotated[float, Flag(min=0, max=100, help="Times an H200's step times.")] = 1.0,
    vocabulary: Annotated[str, Flag(help="bytes, or words.")] = "bytes",
    out: Annotated[Path | None, Flag(help="Where the results go.")] = None,
    commit: Annotated[str | None, Flag(help="Recorded where there is no git.")] = None,
) -> None:
    if vocabulary not in ("bytes", "words"):
        raise typer.BadParameter("--vocabulary is bytes or words")
    if unknown := set(cases.split(",")) - CASES.keys():
        raise typer.BadParameter(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    result: Row = {
        "machine": machine.facts(commit),
        "options": {"streams": streams, "rounds": rounds, "slower": slower, "vocabulary": vocabulary},
        "cases": {},
    }
    generator = random.Random(1)
    with tempfile.TemporaryDirectory(prefix="stream-path-") as scratch, ExitStack() as running:
        folder = write_folder(Path(scratch) / "model", vocabulary, slower)
        command = [sys.executable, "-m", "benchmarks.paced_engine", "--model", str(folder)]
        url, process = running.enter_context(started(command, "/health/ready"))
        for case in cases.split(","):
            drawn = partial(prompts, generator, streams, *CASES[case])
            rows = asyncio.run(
                measure(folder, url, process.pid, rounds, drawn, lambda row: typer.echo(json.dumps(row)))
            )
            result["cases"][case] = {**summary(rows), "rows": rows}
            typer.echo(f"{case}: {json.dumps(summary(rows))}")
    if out is not None:
        write_out(out, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
