"""A headless Chromium driven over the pipe of its DevTools protocol. Knows no page."""

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",  # as root, in a container, there is none to be had
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
]


class PageError(Exception):
    """A script of ours that failed in the page, or a command that the browser refused."""


class Page:
    """One tab. Commands are answered in order, events between the answers are kept in `log`."""

    def __init__(self, to_browser: BinaryIO, from_browser: BinaryIO) -> None:
        self._to, self._from = to_browser, from_browser
        self._ids = itertools.count(1)
        self._session: str | None = None
        self.log: list[dict[str, Any]] = []
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        message: dict[str, Any] = {"id": next(self._ids), "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while (reply := self._read()).get("id") != message["id"]:
            self.log.append(reply)
        if "error" in reply:
            raise PageError(f"{method}: {reply['error']}")
        result: dict[str, Any] = reply["result"]
        return result

    def evaluate(self, script: str) -> Any:
        """The value of an expression, a promise's once it is settled."""
        result = self.command("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise PageError(str(result["exceptionDetails"]))
        return result["result"].get("value")

    def type(self, text: str) -> None:
        self.command("Input.insertText", text=text)

    def press_enter(self) -> None:
        for kind in ("keyDown", "keyUp"):
            self.command(
                "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", text="\r", windowsVirtualKeyCode=13
            )

    def problems(self) -> list[str]:
        """Uncaught exceptions and what the browser complained about, such as a broken content security policy."""
        bad = ("Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.log if event.get("method") in bad]

    def _read(self) -> dict[str, Any]:
        data = bytearray()
        while (byte := self._from.read(1)) != b"\0":
            if not byte:
                raise PageError("the browser ended")
            data += byte
        message: dict[str, Any] = json.loads(data)
        return message


@contextmanager
def open_page(profile: Path) -> Iterator[Page]:
    assert CHROMIUM is not None
    commands_read, commands_write = os.pipe()
    replies_read, replies_write = os.pipe()
    # The protocol wants descriptors 3 and 4, and only the child may have them.
    script = f'exec "$@" 3<&{commands_read} 4>&{replies_write}'
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", CHROMIUM, *FLAGS, f"--user-data-dir={profile}"],
        pass_fds=(commands_read, replies_write),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(commands_read)
    os.close(replies_write)
    with open(commands_write, "wb") as to_browser, open(replies_read, "rb") as from_browser:  # noqa: PTH123
        try:
            yield Page(to_browser, from_browser)
        finally:
            process.terminate()
            process.wait()
