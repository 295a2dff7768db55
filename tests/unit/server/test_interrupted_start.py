"""Starts that fail half way, or that a signal comes into."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import cast

import pytest
from scripted_engine import LIMIT, ScriptedEngine, settings, tiny_tokenizer

from server import process
from server.errors import EngineUnavailable
from server.lifecycle import Lifecycle, Phase

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PROGRAM = """
import sys
sys.path[:0] = [{here!r}]
import scripted_engine as fake
from server import process
from server.app import create_app
from server.lifecycle import Lifecycle
class Engine(fake.ScriptedEngine):
    async def shutdown(self, timeout=0.0):
        print("engine shut down", flush=True)
lifecycle = Lifecycle(fake.settings(), Engine(), fake.tiny_tokenizer)
def make_app():
    print("application", flush=True)
    sys.stdin.readline()
    return create_app(lifecycle)
listener = process.listen("127.0.0.1", 0)
process.end(process.serve(make_app, lifecycle, listener, lambda: None))
"""
COMMAND = """
import os, signal, time
from models import registry
registry.resolve = lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(60)
from server.cli import app
app(["serve"])
"""


def started(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
    )


def test_a_signal_before_there_is_an_application_ends_the_engine_and_exits_0() -> None:
    with started(PROGRAM.format(here=str(HERE))) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "application\n"
        server.send_signal(signal.SIGINT)
        rest, _ = server.communicate("go on\n", timeout=LIMIT)
        assert (set(rest.splitlines()), server.returncode) == ({"engine shut down"}, 0)


class Draining:
    """A lifecycle that drains until it is cut."""

    def __init__(self) -> None:
        self.did: list[str] = []

    async def drain(self) -> None:
        self.did.append("drain")
        await asyncio.Event().wait()

    async def cut(self) -> None:
        self.did.append("cut")


async def did_after(*signals: int) -> list[str]:
    """What a server does that has had these signals and then twice SIGTERM; "at once": it has not waited for that."""
    draining = Draining()
    ending = process._Ending(cast(Lifecycle, draining))
    for number in (*signals, signal.SIGTERM, signal.SIGTERM):
        os.kill(os.getpid(), number)
        await asyncio.sleep(0.01)  # a turn of the loop that looks at signals
    await ending.finish()
    return draining.did + ["at once"] * ending._at_once


def test_a_terminal_that_goes_drains_and_never_cuts() -> None:
    """Its shell and its kernel say so, one after the other."""
    assert asyncio.run(did_after(signal.SIGHUP, signal.SIGHUP, signal.SIGHUP)) == ["drain", "cut", "at once"]


def test_under_nohup_a_terminal_that_goes_is_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert asyncio.run(did_after(signal.SIGHUP)) == ["drain", "cut"]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_nothing_waits_for_a_tokenizer_that_loads() -> None:
    began, go_on = threading.Event(), threading.Event()

    async def main() -> None:
        starting = Lifecycle(settings(), ScriptedEngine(), lambda: began.set() or go_on.wait())
        async with starting.lifespan(None):
            await asyncio.to_thread(began.wait, LIMIT)

    ending = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    ending.start()
    ending.join(LIMIT)
    try:
        assert began.is_set()
        assert not ending.is_alive()
    finally:
        go_on.set()


def test_sigterm_ends_the_command_before_it_serves() -> None:
    """The kernel gives the first process of a container no signal that it has no handler for."""
    with started(COMMAND) as server:
        assert server.wait(LIMIT) == 0


def test_a_port_is_taken_before_anybody_accepts_there() -> None:
    with process.listen("127.0.0.1", 0) as first, pytest.raises(OSError):
        process.listen(*first.getsockname())


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="there is no IPv6 here")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_address_of_ipv6_may_be_written_as_in_a_url(host: str) -> None:
    with process.listen(host, 0) as listener:
        assert listener.getsockname()[0] == "::1"


def lifecycle(engine: ScriptedEngine) -> Lifecycle:
    return Lifecycle(settings(), engine, tiny_tokenizer)


def test_what_fails_to_prepare_fails_the_start() -> None:
    async def main() -> None:
        starting = lifecycle(ScriptedEngine())

        async def fails() -> None:
            raise OSError("no space left")

        starting.preparations.append(fails)
        async with starting.lifespan(None), asyncio.timeout(LIMIT):
            await starting.wait_until(Phase.FAILED)

    asyncio.run(main())


def test_an_engine_that_ends_while_the_server_does_is_no_failure() -> None:
    async def main() -> None:
        engine = ScriptedEngine()
        engine.load.clear()
        starting = lifecycle(engine)
        before = asyncio.all_tasks()
        async with starting.lifespan(None):
            await starting.drain()
            engine.load_failure = EngineUnavailable("it had the signal, too")
            engine.load.set()
            while asyncio.all_tasks() > before:  # until it has been seen
                await asyncio.sleep(0.002)
            assert starting.phase is Phase.DRAINING

    asyncio.run(asyncio.wait_for(main(), LIMIT))


def test_an_engine_that_cannot_be_started_ends_the_process_with_1() -> None:
    class Lost(ScriptedEngine):
        async def start(self) -> None:
            raise EngineUnavailable("no process can be had")

    listener = process.listen("127.0.0.1", 0)
    with listener:
        assert process.serve(lambda: None, lifecycle(Lost()), listener, lambda: None) == 1
