"""Any engine's OpenAI-compatible server under the serving cases, asked by `longwave bench`'s client. Started by
benchmarks/serving.py, which gives the server's command and environment; knows no engine."""

import asyncio
import gc
import re
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import typer

from benchmarks.serving_cases import Answer, Row
from benchmarks.serving_child import PORT, Opened, Plan, main
from models import descriptions, registry
from server.bench import StreamClient, Target, Turn
from server.bench.text_prompts import ExactText

START_TIMEOUT = 600.0
END_GRACE = 30.0
POLL_SECONDS = 0.05
REQUEST_TIMEOUT = 3600.0


@asynccontextmanager
async def open_engine(plan: Plan) -> AsyncIterator[Opened]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [port if part == PORT else part for part in plan.command]
    url = f"http://127.0.0.1:{port}"
    spawned = time.monotonic()  # what this client imported before is not its start
    # It stays in this process's group, which is ended as a whole if need be.
    process = await asyncio.create_subprocess_exec(*command, env=plan.environment, stdout=sys.stderr)
    try:
        async with asyncio.timeout(START_TIMEOUT):
            stages = await _ready(url, process)
        target = Target(
            url,
            plan.model,  # all of them serve a folder under its path
            temperature=1.0,
            ignore_eos=plan.ignore_eos,
            timeout=REQUEST_TIMEOUT,
            extra_body=plan.extra_body,
            running_usage=True,  # as `longwave bench serve`: a chunk may have several tokens
        )
        client = StreamClient(target)
        inexact = False  # said once
        as_turn = _texts(plan.model) if plan.prompt_format == "text" else _token_ids

        async def ask(prompt: list[int], out: int) -> Answer:
            nonlocal inexact
            outcome = await client.complete(as_turn(prompt, out))
            if not outcome.completed:
                raise RuntimeError(f"{outcome.failure} {outcome.detail}".strip())
            if outcome.output_tokens != out:
                raise RuntimeError(f"{outcome.output_tokens} tokens came, {out} were asked for")
            if not outcome.chunks_are_tokens and not inexact:
                inexact = True
                typer.echo("tokens of chunks are not told, and do not add up: ITL is a chunk's", err=True)
            return Answer(outcome.ttft, outcome.itls, outcome.output_tokens)

        gc.freeze()  # a collection that looks at all that was imported takes as long as some steps
        yield Opened(ask, {"client": "server.bench", **stages}, spawned)
        client.close()
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(END_GRACE):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


def _token_ids(prompt: list[int], out: int) -> Turn:
    return Turn(prompt, len(prompt), out)


def _texts(model: str) -> Callable[[list[int], int], Turn]:
    """As many words of one token each, in place of the token ids."""
    text = ExactText(descriptions.load_tokenizer(registry.resolve(model)))
    words = text.vocabulary

    def as_turn(prompt: list[int], out: int) -> Turn:
        ids = [words[token % len(words)] for token in prompt]
        return text.as_text((Turn(ids, len(ids), out),))[0]

    return as_turn


async def _ready(url: str, process: asyncio.subprocess.Process) -> Row:
    """Until it says so; then the stages of its start, where it tells them. Raises RuntimeError when it ends instead."""
    async with httpx.AsyncClient(timeout=5) as client:
        while process.returncode is None:
            try:
                if (await client.get(f"{url}/health")).status_code == 200:
                    return _stages((await client.get(f"{url}/metrics")).text)
            except httpx.TransportError:
                pass
            await asyncio.sleep(POLL_SECONDS)
    raise RuntimeError(f"the server ended with code {process.returncode} before it was ready")


def _stages(metrics: str) -> Row:
    """Ours alone has this metric."""
    told = re.finditer(r'^longwave:start_seconds{.*stage="([^"]*)".*} (\S+)$', metrics, re.MULTILINE)
    stages = {stage: round(float(seconds), 2) for stage, seconds in (found.groups() for found in told)}
    return {"stages": stages} if stages else {}


if __name__ == "__main__":
    main(open_engine)
