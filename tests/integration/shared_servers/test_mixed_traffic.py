"""What the soak and the look at sockets (benchmarks/soak.py, egress.py) send to a server: ours answers all of it as it
must, and connects to nobody."""

import asyncio

import pytest

from benchmarks.egress import SocketWatch
from benchmarks.fault_clients import Target
from benchmarks.mixed_traffic import MIXED
from benchmarks.trial_server import TrialServer

from ..conftest import MAX_MODEL_LEN
from ..questions import MODEL
from ..server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_every_kind_is_answered_as_it_must_be_and_nobody_is_connected_to(server: ServerProcess) -> None:
    trial = TrialServer(Target(server.url, MODEL, MAX_MODEL_LEN, server.process))
    wrong = []
    with SocketWatch(trial) as watch:
        for number, kind in enumerate(dict.fromkeys(MIXED)):
            if not asyncio.run(kind(trial, number)):
                wrong.append(kind.__name__)

    server.wait_until_idle()
    assert wrong == []
    assert watch.looks > 1
    assert len(watch.processes) >= 2, "the server's and the engine's"
    assert watch.strangers == set()
