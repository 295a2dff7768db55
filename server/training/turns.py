"""In which order the training process carries out its commands: one after the other, and beside those that only compute
the saves that shall not wait for them. Must not know what is trained."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Protocol

from server.training.calls import Create, OptimStep
from server.training.messages import Command, Done, Failed, Load, Remove, Save

#: While one of them is carried out, weights are not what they were nor what they will be.
CHANGES = (Create, OptimStep, Load, Remove)


class Link(Protocol):
    """server.training.link.WorkerLink."""

    def receive(self) -> Command | None: ...
    def send(self, message: Done | Failed) -> None: ...


def take_turns(link: Link, answer: Callable[[Command], Done | Failed]) -> None:
    """Returns when the API process is gone. `answer` is called on this thread, and on another one for saves `beside`
    others, also while it computes on this one. Raises what it raises there or here, and what the link raises."""
    turns: SimpleQueue[Command | Exception | None] = SimpleQueue()
    saves: SimpleQueue[Command | None] = SimpleQueue()
    changing = threading.Lock()

    def carry_out(command: Command) -> None:
        with changing if _is_beside(command) or isinstance(command.work, CHANGES) else nullcontext():
            link.send(answer(command))  # inside: who hears of a save has heard of the step that it holds

    def receive() -> None:
        try:
            while (command := link.receive()) is not None:
                (saves if _is_beside(command) else turns).put(command)
            turns.put(None)
        except Exception as error:
            turns.put(error)
        saves.put(None)

    def save() -> None:
        try:
            while (command := saves.get()) is not None:
                carry_out(command)
        except Exception as error:  # the process is unfit to go on, and says so where it would go on
            turns.put(error)

    threading.Thread(target=receive, name="commands", daemon=True).start()
    saving = threading.Thread(target=save, name="saves", daemon=True)
    saving.start()
    while (turn := turns.get()) is not None:
        if isinstance(turn, Exception):
            raise turn
        carry_out(turn)
    saving.join()


def _is_beside(command: Command) -> bool:
    return isinstance(command.work, Save) and command.work.beside
