"""The stopwatch on a device that only keeps time: what the host does before a launch is not measured."""

from dataclasses import dataclass

import pytest
import torch

from benchmarks import stopwatch
from benchmarks.stopwatch import Stopwatch

CYCLES_PER_SECOND = 1.5e9


@dataclass
class Clocks:
    """Seconds: the host's now, and when the device will have done all that was queued."""

    host: float = 0.0
    device: float = 0.0

    def launch(self, host: float, device: float) -> None:
        self.host += host
        self.device = max(self.device, self.host) + device

    def synchronize(self, *_: object) -> None:
        self.host = max(self.host, self.device)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()

    class Event:
        def __init__(self, *, enable_timing: bool = False) -> None:
            self.at = float("nan")

        def record(self) -> None:
            clocks.launch(1e-6, 0.0)
            self.at = clocks.device

        def query(self) -> bool:
            return self.at <= clocks.host

        def elapsed_time(self, end: "Event") -> float:
            return (end.at - self.at) * 1e3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", clocks.synchronize)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: clocks.launch(5e-6, cycles / CYCLES_PER_SECOND))
    monkeypatch.setattr(stopwatch, "perf_counter", lambda: clocks.host)
    return clocks


@pytest.fixture
def watch() -> Stopwatch:
    return Stopwatch(torch.device("cpu"), flush=False)


@pytest.mark.parametrize("host_us", [1, 130, 900])
def test_the_host_s_time_to_launch_is_not_measured(clocks: Clocks, watch: Stopwatch, host_us: int) -> None:
    times = watch.times([lambda: clocks.launch(host_us * 1e-6, 65e-6)])
    assert len(times) == 300
    assert times == pytest.approx([0.065] * 300)


def test_a_host_that_becomes_slower_is_waited_for(clocks: Clocks, watch: Stopwatch) -> None:
    calls = 0

    def slower() -> None:
        nonlocal calls
        calls += 1
        clocks.launch(20e-6 if calls < 100 else 200e-6, 65e-6)

    assert watch.times([slower]) == pytest.approx([0.065] * 300)


def test_a_call_that_waits_for_the_device_itself_is_timed_with_its_waits(clocks: Clocks, watch: Stopwatch) -> None:
    def call() -> None:
        clocks.launch(50e-6, 100e-6)
        clocks.synchronize()

    assert watch.times([call])[-1] == pytest.approx(0.151)


def test_inputs_are_used_in_turn_across_batches(clocks: Clocks, watch: Stopwatch) -> None:
    """Of three inputs with times of their own, in batches whose size is no multiple of three."""
    calls = [lambda ms=ms: clocks.launch(1e-6, ms * 1e-3) for ms in (0.1, 0.2, 0.3)]
    times = watch.times(calls)
    assert len(times) > 2 * stopwatch._QUEUED
    assert times[:6] == pytest.approx([0.1, 0.2, 0.3] * 2)
    assert times[-3:] == pytest.approx([[0.1, 0.2, 0.3][i % 3] for i in range(len(times) - 3, len(times))])
