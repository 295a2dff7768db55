"""The turns of commands in the training process, with a link and an answer of the test's own."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest
from live_training import LIMIT, STEP, compute

from server.training.calls import Create
from server.training.messages import Command, Done, Failed, Load, Remove, Save, Work
from server.training.turns import take_turns

BESIDE, IN_TURN = Save("folder", True, {}, True), Save("folder", True, {})
CHANGING = [Create(8, 32, None, 0), STEP, Load("folder", True), Remove()]

pytestmark = pytest.mark.timeout(180)


class Turns:
    """`take_turns` at work. Every command is held until `go` on it, but those that are let go from the start."""

    def __init__(self) -> None:
        self.begun: SimpleQueue[int] = SimpleQueue()
        self.sent: SimpleQueue[int] = SimpleQueue()
        self.failures: dict[int, Exception] = {}
        self._commands: SimpleQueue[Command | Exception | None] = SimpleQueue()
        self._gates: dict[int, threading.Event] = {}

    def ask(self, *commands: Work, go: bool = False) -> None:
        for work in commands:
            number = len(self._gates)
            gate = self._gates[number] = threading.Event()
            if go:
                gate.set()
            self._commands.put(Command(number, "model", work))

    def go(self, number: int) -> None:
        self._gates[number].set()

    def end(self, how: Exception | None = None) -> None:
        self._commands.put(how)

    def receive(self) -> Command | None:
        command = self._commands.get(timeout=LIMIT)
        if isinstance(command, Exception):
            raise command
        return command

    def send(self, message: Done | Failed) -> None:
        assert isinstance(message, Done)
        self.sent.put(message.command_id)

    def answer(self, command: Command) -> Done:
        self.begun.put(command.command_id)
        assert self._gates[command.command_id].wait(LIMIT)
        if command.command_id in self.failures:
            raise self.failures[command.command_id]
        return Done(command.command_id)


@contextmanager
def taking_turns() -> Iterator[tuple[Turns, Callable[[], None]]]:
    """And what returns when they are over, or raises what they raised."""
    turns = Turns()
    with ThreadPoolExecutor(1) as pool:
        over = pool.submit(take_turns, turns, turns.answer)
        yield turns, lambda: over.result(LIMIT)


def of(queue: "SimpleQueue[int]", count: int) -> list[int]:
    return [queue.get(timeout=LIMIT) for _ in range(count)]


@pytest.mark.parametrize("first", [compute(), compute(backward=False), IN_TURN], ids=["backward", "forward", "save"])
def test_a_save_beside_others_waits_for_none_that_changes_no_weights(first: Any) -> None:
    with taking_turns() as (turns, over):
        turns.ask(first)
        assert of(turns.begun, 1) == [0]
        turns.ask(STEP, BESIDE, go=True)
        assert of(turns.sent, 1) == [2]
        turns.go(0)
        assert of(turns.sent, 2) == [0, 1]
        turns.end()
        over()


@pytest.mark.parametrize("changing", CHANGING, ids=lambda work: type(work).__name__)
def test_it_waits_for_the_one_that_changes_weights_and_that_one_for_it(changing: Any) -> None:
    with taking_turns() as (turns, over):
        turns.ask(changing)
        assert of(turns.begun, 1) == [0]
        turns.ask(BESIDE)
        turns.go(0)
        assert of(turns.begun, 1) == [1]
        assert of(turns.sent, 1) == [0]  # so whoever hears of the save knows what it holds
        turns.ask(changing, go=True)
        turns.go(1)
        assert of(turns.sent, 2) == [1, 2]
        turns.end()
        over()


def test_what_is_not_beside_has_its_turn() -> None:
    with taking_turns() as (turns, over):
        turns.ask(compute())
        turns.ask(IN_TURN, STEP, compute(), go=True)
        turns.go(0)
        assert of(turns.sent, 4) == [0, 1, 2, 3]
        turns.end()
        over()


def test_the_end_waits_for_a_save_that_has_begun() -> None:
    with taking_turns() as (turns, over):
        turns.ask(BESIDE)
        assert of(turns.begun, 1) == [0]
        turns.end()
        turns.go(0)
        over()
        assert of(turns.sent, 1) == [0]


@pytest.mark.parametrize("work", [compute(), BESIDE], ids=["in its turn", "beside"])
def test_what_leaves_the_process_unfit_is_raised(work: Any) -> None:
    with taking_turns() as (turns, over):
        turns.failures[0] = RuntimeError("the device is lost")
        turns.ask(work, go=True)
        with pytest.raises(RuntimeError, match="the device is lost"):
            over()
        turns.end()


def test_what_cannot_be_read_is_raised_when_all_before_it_is_done() -> None:
    with taking_turns() as (turns, over):
        turns.ask(compute(), go=True)
        turns.end(ValueError("no command"))
        with pytest.raises(ValueError, match="no command"):
            over()
        assert of(turns.sent, 1) == [0]
