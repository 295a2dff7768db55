"""Trial: the engine's process is killed under load, again and again. Design: R9."""

import asyncio
import contextlib
import os
import signal
import time

from benchmarks import fault_clients
from benchmarks.process_tree import zombies
from benchmarks.trial import Measure, Scale, percentile
from benchmarks.trial_client import Answer, ask, chat, closed_loop
from benchmarks.trial_server import TrialServer, held, trial_server

DEATHS = 3  # within five minutes, after which a server starts its engine again; the next is final
CLIENTS = 8
TOKENS = 512
LOADED = 2.0  # seconds of load before a kill
AFTER = 1.0  # and after it: who comes meanwhile is refused
TOLD = 1.0  # seconds within which an open stream is told
FILES = 8  # that a server may have more of: connections that are being closed


class _Seen:
    """Of all kills."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.told: list[float] = []  # seconds from a kill until the streams that it broke off had ended
        self.recovered: list[float] = []
        self.lost = self.zombies = self.files = 0
        self.is_final = False


def engine_kills(scale: Scale) -> list[Measure]:
    """A server for three kills each; the last one gets a fourth, which is final."""
    seen, left = _Seen(), scale.kills
    while left:
        now = left % DEATHS or DEATHS  # so that the last server has all that it takes
        with trial_server(scale.model) as server:
            fault_clients.good(server.target)
            files = held(server.pid).files
            for _ in range(now):
                asyncio.run(_kill_under_load(server, seen))
                recovered = fault_clients.answers_after(server.target)
                seen.lost += recovered is None
                seen.recovered.append(fault_clients.RECOVERY if recovered is None else AFTER + recovered)
                seen.zombies += zombies(server.pid)
                left -= 1
            server.idle_after()
            seen.files = max(seen.files, held(server.pid).files - files)
            if not left:
                seen.is_final = _ends_for_good(server)
    unclear = [answer for answer in seen.answers if not answer.is_clear]
    return [
        Measure("kills", scale.kills),
        Measure("requests", len(seen.answers)),
        Measure("of them broken off or refused, and told", sum(not answer.is_whole for answer in seen.answers)),
        Measure("neither answered nor told", len(unclear), 0),
        Measure("seconds until a broken stream is told, at most", max(seen.told, default=0.0), TOLD),
        Measure("kills after which nothing was answered", seen.lost, 0),
        Measure("seconds until an answer, p50", percentile(seen.recovered, 50)),
        Measure("seconds until an answer, at most", max(seen.recovered)),
        Measure("zombies", seen.zombies, 0),
        Measure("files more than before", seen.files, FILES),
        Measure("after one kill too many it says so (1: yes)", seen.is_final, 1, at_least=True),
    ]


async def _kill_under_load(server: TrialServer, seen: _Seen) -> None:
    """Clients that stream, one after the other, and never wait after a refusal longer than a moment."""

    async def send(number: int) -> Answer:
        answer = await ask(server.url, chat(server, f"{number} Count.", TOKENS, stream=True))
        if not answer.is_whole:
            await asyncio.sleep(0.1)
        return answer

    load = asyncio.create_task(closed_loop(CLIENTS, LOADED + AFTER, send))
    await asyncio.sleep(LOADED)
    killed = time.monotonic()
    _kill(server)
    answers = await load
    broken = [answer for answer in answers if answer.sent < killed < answer.ended and not answer.is_whole]
    seen.told += [answer.ended - killed for answer in broken]
    seen.answers += answers


def _kill(server: TrialServer) -> None:
    engine = server.engine()
    if engine is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine, signal.SIGKILL)


def _ends_for_good(server: TrialServer) -> bool:
    """After more deaths than a server takes within five minutes: it is up, not live, and refuses with a clear error."""
    for _ in range(DEATHS + 1):  # those before may be more than five minutes ago
        _kill(server)
        if not _comes_back(server):
            answer = asyncio.run(ask(server.url, chat(server, "Say hello.", 1)))
            return answer.is_refusal and not zombies(server.pid)
    return False


def _comes_back(server: TrialServer) -> bool:
    """Or says that it will not."""
    end = time.monotonic() + fault_clients.RECOVERY
    while time.monotonic() < end:
        if server.status("/health/live") == 503:
            return False
        if server.status("/health/ready") == 200 and server.engine() is not None:
            time.sleep(fault_clients.POLL)  # or the last one's death was not noticed yet
            if fault_clients.good(server.target).status == 200:
                return True
        time.sleep(fault_clients.POLL)
    return True
