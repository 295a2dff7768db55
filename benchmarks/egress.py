"""Trial: whether any process of a server speaks with anybody but its clients. Design: S10, and no telemetry.

Every Python process of the server notes what it connects, sends to and looks up (audit hooks, which miss what a library
in C does by itself), and the sockets of all of them are looked at many times a second (/proc, which misses what is
shorter than that). No variable tells libraries to stay offline.
"""

import asyncio
import json
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from benchmarks.mixed_traffic import EVERY_KIND
from benchmarks.process_tree import family
from benchmarks.trial import Measure, Scale
from benchmarks.trial_server import SMALL, TrialServer, trial_server

#: Begins every Python process of the server.
HOOK = """
import json, os, sys
def note(event, arguments):
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        family, address = arguments[0].family.name, arguments[1]
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        family, address = "a name", arguments[0]
    else:
        return
    host = address[0] if isinstance(address, tuple) else address
    write(family, host.decode() if isinstance(host, bytes) else str(host))
def write(*words):
    with open(os.environ["EGRESS_NOTES"], "a") as notes:
        notes.write(json.dumps(words) + chr(10))
write("begins", sys.executable)
sys.addaudithook(note)
"""
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK")
TRAINABLE = "bundled"  # a job reads its weights
BEGINS, NOTING = "begins", 3  # the server, its engine, a trainer
TABLES = ("tcp", "tcp6", "udp", "udp6", "raw", "raw6")
NOWHERE = "0" * 8, "0" * 32  # the other end of a socket that listens
OWN = ("localhost", "::1", "None", "")  # of hosts: this machine
LOOK = 0.05  # seconds between two


def egress(_scale: Scale) -> list[Measure]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(HOOK)
        notes = Path(folder) / "notes"
        notes.touch()
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        changed = {"PYTHONPATH": path, "EGRESS_NOTES": str(notes)}
        environment = {name: value for name, value in os.environ.items() if name not in OFFLINE} | changed
        with trial_server(TRAINABLE, SMALL, environment) as server, SocketWatch(server) as watch:
            right = asyncio.run(_every_kind(server))
        noted = [json.loads(line) for line in notes.read_text().splitlines()]
    begun = sum(family == BEGINS for family, _ in noted)
    outside = [one for one in noted if leaves_machine(*one)]
    return [
        Measure("kinds of requests", len(EVERY_KIND)),
        Measure("not answered or refused as they must be", len(EVERY_KIND) - right, 0),
        Measure("Python processes that note", begun, NOTING, at_least=True),
        Measure("connections, sends and lookups of theirs", len(noted) - begun),
        Measure("of them to other machines", len(outside), 0),
        Measure("looks at the sockets of all processes", watch.looks),
        Measure("processes seen", len(watch.processes)),
        Measure("sockets whose other end is no client", len(watch.strangers), 0),
    ]


async def _every_kind(server: TrialServer) -> int:
    return sum([await kind(server, number) for number, kind in enumerate(EVERY_KIND)])


def leaves_machine(family: str, host: str) -> bool:
    """Whether what was noted is anything but this machine's own."""
    return family not in ("AF_UNIX", BEGINS) and not host.startswith("127.") and host not in OWN


class SocketWatch:
    """Looks at the sockets of a server's processes until it ends."""

    def __init__(self, server: TrialServer) -> None:
        self._pid, self._port = server.pid, int(server.url.rpartition(":")[2])
        self.looks = 0
        self.processes: set[int] = set()
        self.strangers: set[tuple[str, str]] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on)

    def __enter__(self) -> "SocketWatch":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _look_on(self) -> None:
        while not self._over.wait(LOOK):
            for pid in family(self._pid):
                self.processes.add(pid)
                self.strangers |= {ends for ends in ends_of(pid) if self._is_strange(*ends)}
            self.looks += 1

    def _is_strange(self, local: str, other: str) -> bool:
        """Clients have come to the server's port; what it does not listen at, it has connected itself."""
        address, _, _ = other.partition(":")
        return address not in NOWHERE and int(local.rpartition(":")[2], 16) != self._port


def ends_of(pid: int) -> Iterator[tuple[str, str]]:
    """Both addresses, in the kernel's figures, of each socket but Unix ones that a process has open."""
    inodes, tables = set(), []
    with suppress(OSError):  # it ended meanwhile
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # it was closed meanwhile
                inodes.add(str(file.readlink()).removeprefix("socket:[").removesuffix("]"))
        tables = [Path(f"/proc/{pid}/net/{table}").read_text() for table in TABLES]
    for table in tables:
        for line in table.splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes:
                yield fields[1], fields[2]
