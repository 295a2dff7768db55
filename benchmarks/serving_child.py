"""The process that has one engine under test: reads its plan from the command line, writes one JSON row a case.

Runs beside any engine, in its environment: the standard library only. Knows no engine.
"""

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

from benchmarks.serving_cases import Ask, Bench, Row, Size, run_cases

PORT = "PORT"  # in a server's command: the free port that its process will find


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    model: str  # a folder
    vocab_size: int
    load_format: str
    dtype: str
    device: str
    cases: tuple[str, ...]
    scale: float
    spawned: float  # time.monotonic() of the parent: on Linux all processes share this clock
    engine: dict[str, Any] = field(default_factory=dict)  # arguments by the engine's own names
    command: tuple[str, ...] = ()  # of the server, when the cases go through HTTP
    environment: dict[str, str] = field(default_factory=dict)  # of that server
    prompt_format: str = "token_ids"  # or text, for a server that takes no token ids
    ignore_eos: bool = True  # false: the server does not know the field, and `extra_body` has the same effect
    extra_body: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> Size:
        return Size(self.scale)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        fields = json.loads(text)
        return cls(**{**fields, "cases": tuple(fields["cases"]), "command": tuple(fields["command"])})


@dataclass(frozen=True, slots=True)
class Opened:
    """An engine that is ready, and what is worth knowing of it (versions, sizes)."""

    ask: Ask
    facts: Row
    spawned: float | None = None  # its process, on the plan's clock; None: it is in this one


OpenEngine = Callable[[Plan], AbstractAsyncContextManager[Opened]]


def end_with_parent() -> None:
    """Ends this process and its children, a group of their own, when the parent lets go of our stdin, however it
    ended: an engine that nobody reads from must not keep a GPU."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def take_stdout() -> TextIO:
    """The rows' way out. Whatever else this process and its children print goes to stderr from now on."""
    rows = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return rows


async def run(plan: Plan, open_engine: OpenEngine, emit: Callable[[Row], None]) -> None:
    async with open_engine(plan) as engine:
        spawned, ready = engine.spawned or plan.spawned, time.monotonic()
        bench = Bench(engine.ask, plan.vocab_size, plan.size)
        await bench.one(bench.prompt(plan.size.tokens(512)), 2)
        to_first_token = time.monotonic() - spawned
        emit({"case": "start", "s": round(to_first_token, 2), "ready_s": round(ready - spawned, 2), **engine.facts})
        await run_cases(bench, plan.cases, emit)


def main(open_engine: OpenEngine) -> None:
    """Raises SystemExit where it was not started by benchmarks/serving.py, in whose absence others would be ended."""
    if len(sys.argv) != 2 or not sys.argv[1].startswith("{"):
        raise SystemExit("benchmarks/serving.py starts this process, and gives it a plan: python -m benchmarks.serving")
    end_with_parent()
    rows = take_stdout()
    asyncio.run(run(Plan.from_json(sys.argv[1]), open_engine, lambda row: print(json.dumps(row), file=rows)))
