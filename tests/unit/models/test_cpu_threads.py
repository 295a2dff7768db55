"""Threads on a CPU that others use: fewer where they stand without a core, more again when there is room."""

from pathlib import Path

import pytest

from models.cpu_threads import LONGEST_REST, LOOK_SECONDS, CpuThreads, waited_seconds


class Machine:
    """`free`: cores that nobody else uses. Steps of `layers` take so many times `layer_seconds`."""

    def __init__(self, most: int, free: float, *, layers: int = 1, layer_seconds: float = 0.001) -> None:
        self.free, self.now, self.waited = free, 0.0, 0.0
        self.layers, self.layer_seconds = layers, layer_seconds
        self.set: list[int] = []
        self.threads = CpuThreads(most, waited=lambda: self.waited, clock=lambda: self.now, set_threads=self.set.append)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.step()

    def step(self) -> None:
        with self.threads.step():
            for _ in range(self.layers):
                self.threads.look()
                self.now += self.layer_seconds
                self.waited += self.layer_seconds * max(0.0, self.threads.count - self.free)


@pytest.mark.parametrize(
    ("most", "free", "count"), [(2, 2, 2), (2, 1, 1), (2, 0.5, 1), (8, 8, 8), (8, 5, 5), (8, 0, 1)]
)
def test_as_many_as_have_cores(most: int, free: float, count: int) -> None:
    machine = Machine(most, free)
    machine.run(3 * LOOK_SECONDS)
    assert machine.threads.count == count
    assert (machine.set == []) == (count == most)


def test_they_come_back_when_the_others_are_gone(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(4, free=2)
    with caplog.at_level("INFO", "models.cpu_threads"):
        machine.run(10.0)
    assert "room for 2 of 4 threads" in caplog.text
    assert machine.threads.count in (2, 3)
    machine.free = 4
    machine.run(LONGEST_REST + 1)
    assert machine.threads.count == 4


def test_tries_that_fail_become_rare() -> None:
    machine = Machine(2, free=1)
    machine.run(60.0)
    early = len(machine.set)
    machine.run(300.0)
    late = len(machine.set) - early
    assert late <= 2 * (300 / LONGEST_REST + 1)
    assert machine.threads.count == 1


def test_what_was_counted_between_requests_says_nothing() -> None:
    machine = Machine(2, free=2)
    machine.run(1.0)
    machine.now += 30.0
    machine.waited += 100.0
    machine.run(1.0)
    assert machine.set == []


@pytest.mark.parametrize("seconds", [0.5, 3.0, 60.0])
def test_a_step_that_takes_long_is_no_break_between_steps(seconds: float) -> None:
    machine = Machine(2, free=1, layer_seconds=seconds)
    machine.step()
    assert machine.threads.count == 1


def test_a_long_step_goes_on_with_fewer_threads() -> None:
    machine = Machine(2, free=1, layers=8, layer_seconds=LOOK_SECONDS / 2)
    machine.step()
    assert machine.threads.count == 1
    assert machine.waited == pytest.approx(LOOK_SECONDS)


def test_one_thread_and_a_kernel_that_does_not_count_are_left_alone() -> None:
    alone = Machine(1, free=0)
    alone.run(3.0)
    assert alone.set == []
    set_to: list[int] = []
    blind = CpuThreads(2, waited=lambda: None, set_threads=set_to.append)
    for _ in range(3):
        with blind.step():
            blind.look()
    assert set_to == []


def test_what_the_kernel_counts_is_read(tmp_path: Path) -> None:
    for name, waited in (("7", 1_500_000_000), ("8", 250_000_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "schedstat").write_text(f"12345 {waited} 17\n")
    assert waited_seconds(tmp_path) == 1.75
    (tmp_path / "9").mkdir()
    assert waited_seconds(tmp_path) is None
    assert waited_seconds(tmp_path / "none") == 0.0
    before = waited_seconds()
    assert before is None or before >= 0
