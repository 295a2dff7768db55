"""What a fine-tuning job costs the chats that a server answers beside it on one device, and what they cost the job.

Starts a server on random weights of Llama-3.1-8B's shape; streams chats of random tokens without a job; starts a LoRA
job of long sequences and takes its speed without chats; streams chats again while it trains. Once for each share of the
time that the trainer may have (--training-gpu-share; 1: it never rests).

    python -m benchmarks.beside_training --out benchmarks/results/beside_training_h200.json
    python -m benchmarks.beside_training --tiny --seconds 5      # a shape for a CPU, to try the script itself

It prints what it finds as it goes, and `--out` holds after every share what is known by then.
"""

import asyncio
import json
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import torch
import typer

from benchmarks import machine, model_folder
from benchmarks.started_server import started_server
from benchmarks.training_job import Job, speed
from server.bench import Measurement, Outcome, StreamClient, Target, Turn, measure

GOAL = 1.25  # times the p99 TPOT without a job


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked at once, again and again for so many seconds, and the sequences that are learnt."""

    chats: int
    prompt: int
    answer: int
    seconds: float
    sequence: int


async def chats(client: StreamClient, load: Load, vocabulary: int, seed: int) -> Measurement:
    """So many streams, each asking the next question when it has its answer, until the time is over; one at least."""
    words = random.Random(seed)
    begin = time.perf_counter()

    async def stream() -> list[Outcome]:
        outcomes: list[Outcome] = []
        while not outcomes or time.perf_counter() - begin < load.seconds:
            prompt = [words.randrange(3, vocabulary) for _ in range(load.prompt)]
            outcomes.append(await client.complete(Turn(prompt, load.prompt, load.answer)))
        return outcomes

    done = await asyncio.gather(*(stream() for _ in range(load.chats)))
    found = measure([outcome for outcomes in done for outcome in outcomes], time.perf_counter() - begin, {})
    if found.failed:
        raise SystemExit(f"{found.failed} chats failed: {found.failure_details}")
    return found


def figures(found: Measurement) -> dict[str, Any]:
    """Milliseconds."""
    times = {
        f"{name}_p{percent}_ms": round(found.distributions[name].percentile(percent), 3)
        for name in ("tpot", "itl", "ttft")
        for percent in (50, 99)
    }
    return {"answers": found.completed, "tokens_per_s": round(found.output_throughput, 1), **times}


async def compare(url: str, load: Load, vocabulary: int) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        # Drawn and not greedy: random weights would fall into repetitions.
        client = StreamClient(Target(url, model, temperature=1.0))
        job = Job(http, model, vocabulary, load.sequence)

        async def both(seed: int) -> tuple[Measurement, dict[str, Any]]:
            over = asyncio.Event()
            rate = asyncio.create_task(speed(job.progress, over))
            found = await chats(client, load, vocabulary, seed)
            over.set()
            return found, await rate

        await chats(client, Load(load.chats, load.prompt, load.answer, 0.0, 0), vocabulary, 0)  # warms up
        without, _ = await both(1)
        row: dict[str, Any] = {"without_job": figures(without)}
        say("without a job", row["without_job"])
        await job.start()
        over = asyncio.Event()
        asyncio.get_running_loop().call_later(load.seconds / 2, over.set)
        row["job_alone"] = await speed(job.progress, over)
        say("the job alone", row["job_alone"])
        beside, rate = await both(2)
        await job.check()
        await job.cancel()
        client.close()
        row["beside_job"] = figures(beside) | rate
        say("beside the job", row["beside_job"])
        for name in ("tpot_p50_ms", "tpot_p99_ms", "itl_p50_ms", "itl_p99_ms"):
            row[name.replace("_ms", "_ratio")] = round(row["beside_job"][name] / row["without_job"][name], 3)
        return row


def say(what: str, content: Any) -> None:
    typer.echo(f"{what}: {json.dumps(content)}")


def main(
    shares: Annotated[
        str, typer.Option(help="Shares of the time that training may have, a server for each.")
    ] = "0.25,1",
    number: Annotated[int, typer.Option("--chats", help="Streams at once.")] = 8,
    prompt: Annotated[int, typer.Option(help="Tokens.")] = 512,
    answer: Annotated[int, typer.Option(help="Tokens.")] = 400,
    seconds: Annotated[float, typer.Option(help="For which chats are asked, with and without a job.")] = 20.0,
    sequence: Annotated[int, typer.Option(help="Tokens of a training example, and of a step.")] = 8192,
    utilization: Annotated[float, typer.Option(help="The engine's share of the GPU's memory.")] = 0.4,
    scratch: Annotated[
        Path | None, typer.Option(help="Where model and jobs go for a while; /dev/shm is fastest.")
    ] = None,
    tiny: Annotated[bool, typer.Option(help="A shape that a CPU runs in seconds.")] = False,
    out: Path | None = None,
    commit: Annotated[str | None, typer.Option(help="Recorded as the commit where there is no git.")] = None,
) -> None:
    load = Load(number, prompt, answer, seconds, sequence)
    if tiny:
        load = Load(number, min(prompt, 64), min(answer, 100), seconds, min(sequence, 1024))
    result: dict[str, Any] = {
        "benchmark": "beside_training",
        "machine": machine.facts(commit),
        "packages": {name: machine.installed(name) for name in ("transformers", "peft")},
        "load": {name: getattr(load, name) for name in Load.__slots__},
        "gpu_memory_utilization": utilization,
        "shares": {},
    }
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        begin = time.perf_counter()
        cuda = torch.cuda.is_available()
        model = model_folder.write(Path(folder) / "model", **(model_folder.TINY if tiny else {}))
        model_folder.write_weights(model, device="cuda" if cuda else "cpu")
        if cuda:
            torch.cuda.empty_cache()
        result["model"] = json.loads((model / "config.json").read_text())
        typer.echo(f"weights written in {time.perf_counter() - begin:.1f} s")
        flags = ["--max-model-len", str(load.prompt + load.answer), "--max-num-seqs", str(max(16, load.chats))]
        flags += [
            "--log-level",
            "warning",
            "--num-speculative-tokens",
            "0",
            "--gpu-memory-utilization",
            str(utilization),
        ]
        flags += ["--fine-tuning-batch-tokens", str(load.sequence), "--fine-tuning-checkpoint-every", "1000"]
        if tiny:
            flags += ["--kv-cache-memory-bytes", str(64 << 20)]
        for share in shares.split(","):
            own = ["--data-dir", f"{folder}/data-{share}", "--training-gpu-share", share]
            with started_server(model, [*flags, *own]) as (url, ready):
                typer.echo(f"share {share}: ready after {ready:.1f} s")
                row = asyncio.run(compare(url, load, result["model"]["vocab_size"]))
            result["shares"][share] = row | {"goal_met": row["tpot_p99_ratio"] <= GOAL}
            if out is not None:
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(result, indent=1) + "\n")
    for share, row in result["shares"].items():
        rates = [row[name]["train_tokens_per_s"] for name in ("job_alone", "beside_job")]
        typer.echo(
            f"share {share}: TPOT p50 x {row['tpot_p50_ratio']}, p99 x {row['tpot_p99_ratio']} (goal {GOAL}); "
            f"ITL p99 x {row['itl_p99_ratio']}; the job {rates[0]} tokens/s alone, {rates[1]} beside chats"
        )


if __name__ == "__main__":
    typer.run(main)
