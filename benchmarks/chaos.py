"""Trial: whatever can be killed, stopped or cut is, at random, while the same questions are asked again and again.
Design: R28, for minutes, without faults of a disk."""

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import httpx

from benchmarks import fault_clients
from benchmarks.mixed_traffic import uploaded
from benchmarks.process_tree import zombies
from benchmarks.trial import Measure, Scale
from benchmarks.trial_client import Answer, ask, chat
from benchmarks.trial_server import SMALL, TrialServer, child, held, trial_server

QUESTIONS = ("Count from one to ten.", "What is a tide?", "Name three rivers and where they end.", "Say it backwards.")
TOKENS = 24  # of their answers
CLIENTS = 5
LOAD_TOKENS = 200
ENGINE_EVERY = 110.0  # seconds between two deaths of the engine: a fourth one in five minutes would be its last
TRAINER_EVERY = 40.0  # of a trainer: a job whose trainers die four times without a checkpoint between has failed
PAUSES = (1.0, 6.0)  # seconds between two faults
STOPS = (0.3, 8.0)  # that a process stands still
FILES = 8  # that a server may have more of: connections that are being closed
TRAINER = "server.finetune.worker"
JOB_STEPS = 40
CALM = 20.0  # seconds without faults, at the end, for what is to be whole again


@dataclass
class _Seen:
    faults: Counter[str] = field(default_factory=Counter)
    answers: list[Answer] = field(default_factory=list)
    right: int = 0
    wrong: int = 0
    unanswered: float = 0.0  # seconds, the longest time in which no question had its answer
    jobs: list[str] = field(default_factory=list)  # what became of them


def chaos(scale: Scale) -> list[Measure]:
    flags = (*SMALL, "--dtype", "float32")  # in which an answer does not depend on who else is there
    with trial_server(scale.model, flags, weights=True) as server:
        seen = _Seen()
        expected = {question: _text(asyncio.run(_asked(server, question))) for question in QUESTIONS}
        fault_clients.good(server.target)
        files = held(server.pid).files
        asyncio.run(_everything(server, expected, scale.chaos_seconds, seen))
        idle = server.idle_after()
        more = held(server.pid).files - files
        left = zombies(server.pid)
    told = sum(answer.is_clear for answer in seen.answers)
    return [
        *(Measure(name, count) for name, count in sorted(seen.faults.items())),
        Measure("requests", len(seen.answers)),
        Measure("of them answered", sum(answer.is_whole for answer in seen.answers)),
        Measure("share that was answered, refused or told", told / len(seen.answers), 0.999, at_least=True),
        Measure("known questions answered", seen.right + seen.wrong, 1, at_least=True),
        Measure("of them wrongly", seen.wrong, 0),
        Measure("longest time without such an answer, s", seen.unanswered),
        Measure("fine-tuning jobs", len(seen.jobs), 1, at_least=True),
        Measure("of them not succeeded", sum(status != "succeeded" for status in seen.jobs), 0),
        Measure("seconds until all KV blocks are free", idle, 1),
        Measure("zombies", left, 0),
        Measure("files more than before", more, FILES),
    ]


async def _everything(server: TrialServer, expected: dict[str, str], seconds: float, seen: _Seen) -> None:
    end = time.monotonic() + seconds
    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(_load(server, end, number, seen))
        group.create_task(_known_questions(server, expected, end, seen))
        group.create_task(_jobs(server, end, seen))
        group.create_task(_faults(server, end - CALM, seen))


async def _known_questions(server: TrialServer, expected: dict[str, str], end: float, seen: _Seen) -> None:
    """One a second, by turns."""
    last, number = time.monotonic(), 0
    while time.monotonic() < end:
        question, number = QUESTIONS[number % len(QUESTIONS)], number + 1
        begin = time.monotonic()
        answer = await _asked(server, question)
        seen.answers.append(answer)
        if answer.is_whole:
            right = _text(answer) == expected[question]
            seen.right, seen.wrong = seen.right + right, seen.wrong + (not right)
            seen.unanswered, last = max(seen.unanswered, answer.ended - last), answer.ended
        await asyncio.sleep(max(0.1, begin + 1 - time.monotonic()))


async def _load(server: TrialServer, end: float, client: int, seen: _Seen) -> None:
    """Streams, one after the other; now and then one that is left, which nobody has to be told."""
    rng = random.Random(client)
    while time.monotonic() < end:
        body = chat(server, f"{rng.random()} Tell me more.", rng.randrange(1, LOAD_TOKENS), stream=True)
        if rng.random() < 0.1:
            await ask(server.url, body, leave=lambda _came, has_text: has_text)
            seen.faults["connections reset"] += 1
            continue
        seen.answers.append(await ask(server.url, body))
        if not seen.answers[-1].is_whole:
            await asyncio.sleep(0.2)


async def _jobs(server: TrialServer, end: float, seen: _Seen) -> None:
    """One after the other, and the last to its end."""
    hyperparameters = {"n_epochs": JOB_STEPS // 2, "batch_size": 1}
    method = {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        while time.monotonic() < end - CALM:
            asked = {"model": server.target.model, "training_file": await uploaded(client, 0), "method": method}
            job = (await client.post("/v1/fine_tuning/jobs", json=asked)).json()
            while job.get("status") in ("validating_files", "queued", "running"):
                await asyncio.sleep(0.5)
                job = (await client.get(f"/v1/fine_tuning/jobs/{job['id']}")).json()
            seen.jobs.append(str(job.get("status")))


async def _faults(server: TrialServer, end: float, seen: _Seen) -> None:
    rng = random.Random(28)
    not_before = {"engine": 0.0, "trainer": 0.0}

    async def kill(name: str, pid: int | None, pause: float) -> None:
        if time.monotonic() >= not_before[name] and _send(pid, signal.SIGKILL):
            not_before[name] = time.monotonic() + pause
            seen.faults[f"{name} killed"] += 1

    async def stop(name: str, pid: int | None) -> None:
        if _send(pid, signal.SIGSTOP):
            await asyncio.sleep(rng.uniform(*STOPS))
            _send(pid, signal.SIGCONT)
            seen.faults[f"{name} stopped"] += 1

    kinds: tuple[Callable[[], Awaitable[None]], ...] = (
        lambda: kill("engine", server.engine(), ENGINE_EVERY),
        lambda: kill("trainer", child(server.pid, TRAINER), TRAINER_EVERY),
        lambda: stop("engine", server.engine()),
        lambda: stop("server", server.pid),
        lambda: stop("trainer", child(server.pid, TRAINER)),
    )
    while time.monotonic() < end:
        await asyncio.sleep(rng.uniform(*PAUSES))
        await rng.choice(kinds)()


def _send(pid: int | None, number: int) -> bool:
    """Whether it was there."""
    if pid is None:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


async def _asked(server: TrialServer, question: str) -> Answer:
    return await ask(server.url, chat(server, question, TOKENS))


def _text(answer: Answer) -> str:
    return str(json.loads(answer.content)["choices"][0]["message"]["content"])
