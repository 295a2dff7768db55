"""How many chunks a second the benchmark client takes from many streams at once: it must never be what is measured.

A server process of its own writes one event to every stream in turn, as fast as it can, each in a packet of its own.
Prints chunks per second, and the client's and the server's CPU time of a chunk (the two share what cores there are).

    python -m benchmarks.serving_client --streams 256 --tokens 400
"""

import asyncio
import json
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import machine
from benchmarks.arguments import write_out
from server.bench.stream_client import StreamClient, Target
from server.bench.workload import Turn

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(payload: dict[str, object] | None) -> bytes:
    """An event as one chunk of the transfer coding. None: the end."""
    data = b"[DONE]" if payload is None else json.dumps(payload).encode()
    event = b"data: " + data + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(event), event)


def answer_event(**more: object) -> dict[str, object]:
    return {"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1, "model": "m", **more}


TOKEN = chunk(answer_event(choices=[{"index": 0, "text": " token", "logprobs": None, "finish_reason": None}]))


async def serve(pipe: Connection, streams: int, tokens: int) -> None:
    """Waits for all streams to be asked for, then writes to them in turn."""
    writers: list[asyncio.StreamWriter] = []
    everybody = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD)
        writers.append(writer)
        if len(writers) == streams:
            everybody.set()

    server = await asyncio.start_server(accept, "127.0.0.1", 0, backlog=1024)
    pipe.send(server.sockets[0].getsockname()[1])
    await everybody.wait()
    begin = time.process_time()
    for _ in range(tokens):
        for writer in writers:
            writer.write(TOKEN)
        await asyncio.gather(*(writer.drain() for writer in writers))
    usage = answer_event(choices=[], usage={"prompt_tokens": 1, "completion_tokens": tokens})
    for writer in writers:
        writer.write(chunk(usage) + chunk(None) + b"0\r\n\r\n")
        await writer.drain()
    pipe.send(time.process_time() - begin)


def server_process(pipe: Connection, streams: int, tokens: int) -> None:
    asyncio.run(serve(pipe, streams, tokens))


async def read_all(port: int, streams: int, tokens: int) -> tuple[float, float]:
    """Seconds and CPU seconds. Raises RuntimeError when a stream failed or lost a token."""
    client = StreamClient(Target(f"http://127.0.0.1:{port}", "m"))
    cpu = time.process_time()
    outcomes = await asyncio.gather(*(client.complete(Turn([1], 1, tokens)) for _ in range(streams)))
    cpu = time.process_time() - cpu
    failed = [outcome for outcome in outcomes if not outcome.completed or len(outcome.chunks) != tokens]
    if failed:
        raise RuntimeError(f"{len(failed)} streams failed: {failed[0].failure} {failed[0].detail}")
    client.close()
    begin = min(outcome.chunks[0][0] for outcome in outcomes)
    return max(outcome.ended for outcome in outcomes) - begin, cpu


def measure(streams: int, tokens: int) -> dict[str, float]:
    """One round, with a server of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=server_process, args=(theirs, streams, tokens))
    process.start()
    seconds, cpu = asyncio.run(read_all(ours.recv(), streams, tokens))
    server_cpu = ours.recv()
    process.join()
    total = streams * tokens
    return {
        "chunks_per_s": round(total / seconds),
        "client_cpu_us_a_chunk": round(1e6 * cpu / total, 2),
        "server_cpu_us_a_chunk": round(1e6 * server_cpu / total, 2),
    }


def main(
    streams: Annotated[int, typer.Option(min=1, max=4096)] = 256,
    tokens: Annotated[int, typer.Option(min=2, max=100_000, help="Of each stream.")] = 400,
    rounds: Annotated[int, typer.Option(min=1, max=100)] = 5,
    out: Annotated[Path | None, typer.Option(help="Where the results go.")] = None,
    commit: Annotated[str | None, typer.Option(help="Recorded where there is no git.")] = None,
) -> None:
    rows = []
    for _ in range(rounds):
        rows.append(measure(streams, tokens))
        typer.echo(json.dumps(rows[-1]))
    median = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    typer.echo(f"median: {json.dumps(median)}")
    if out is not None:
        options = {"streams": streams, "tokens": tokens, "rounds": rounds}
        result = {"machine": machine.facts(commit), "options": options, "median": median, "rows": rows}
        write_out(out, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
