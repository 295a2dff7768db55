"""What a start does first, and what it says of its time."""

import asyncio
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from scripted_engine import ScriptedEngine, live_server, settings, tiny_tokenizer

from server import process
from server.engine.messages import EngineReady
from server.lifecycle import Lifecycle, Phase

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys
from server.engine.client import EngineClient
async def start(self):
    print(sorted({"torch", "transformers", "fastapi"} & set(sys.modules)), flush=True)
    raise SystemExit
EngineClient.start = start
from server.cli import app
app(["serve", "--port", "0"])
"""

SERVING = """
import gc, os, signal
from scripted_engine import ScriptedEngine, settings, tiny_tokenizer
from server import process
from server.app import create_app
from server.lifecycle import Lifecycle
def on_ready():
    print(len(gc.get_objects()), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
lifecycle = Lifecycle(settings(), ScriptedEngine(), tiny_tokenizer)
process.serve(lambda: create_app(lifecycle), lifecycle, process.listen("127.0.0.1", 0), on_ready)
"""
FEW_OBJECTS = 10_000  # looked at in a few milliseconds; of what is imported here there are ten times as many


def test_the_engine_is_started_before_anything_slow_is_imported() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


@pytest.mark.parametrize(("command", "said", "code"), [("", "[]\n", 0), ('app(["serve", "no-such-model"])', "", 3)])
def test_a_log_on_a_full_disk_changes_nothing(command: str, said: str, code: int) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM.replace("app([", f"{command}\napp([")],
            env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT, stdout=subprocess.PIPE, stderr=full, text=True,
            check=False,
        )  # fmt: skip
    assert (done.stdout, done.returncode) == (said, code)


def test_no_collection_looks_at_what_was_imported_once_the_server_serves() -> None:
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", SERVING], env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, check=True
    )
    assert int(done.stdout) < FEW_OBJECTS


def test_a_process_knows_when_it_began() -> None:
    before = time.monotonic()
    code = "import time; from server import process; now = time.monotonic(); print(process.began(), now)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, check=True
    )
    began, imported = map(float, done.stdout.split())
    tick = 1 / os.sysconf("SC_CLK_TCK")
    assert before - 2 * tick <= began < imported <= time.monotonic()
    assert process.began() < before


def test_who_has_gone_before_a_start_is_told_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`longwave serve | head -1` serves, and still ends when its engine does."""
    monkeypatch.setattr("gc.freeze", lambda: None)  # this process goes on
    engine, given_up = ScriptedEngine(), []
    engine.alive = False
    lifecycle = Lifecycle(settings(keep_alive_on_engine_death=False), engine, tiny_tokenizer)
    lifecycle.phase = Phase.SERVING

    def announce() -> None:
        raise BrokenPipeError

    ending = SimpleNamespace(give_up=lambda: given_up.append("the engine stays down"))
    asyncio.run(process._watch(cast(Any, None), lifecycle, cast(Any, ending), announce))
    assert given_up


class TimedEngine(ScriptedEngine):
    async def ready(self) -> EngineReady:
        return msgspec.structs.replace(await super().ready(), stages={"imports": 0.26, "weights": 1.5})


def test_a_ready_server_says_where_its_time_went(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "longwave")
    with live_server(engine=TimedEngine()):
        said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("ready in ")]
    assert len(said) == 1
    assert re.search(r": before the engine \d+\.\d, imports 0\.3, weights 1\.5, after it ", said[0])
