"""The engine's way to the API process, without one: for benchmarks that turn the engine's loop themselves."""

from typing import Any


class ListLink:
    """Messages in lists."""

    def __init__(self) -> None:
        self.inbox: list[Any] = []
        self.sent: list[Any] = []

    def receive(self, timeout: float) -> list[Any]:
        del timeout
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, messages: list[Any]) -> None:
        self.sent += messages
