"""A server that was killed is known to be gone at once, and none that lives, or stands still, ever is."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from server.finetune.holders import KEPT_SECONDS, Holders

SERVER = """
import subprocess, sys, threading
from pathlib import Path
from server.finetune.holders import Holders

Holders(Path(sys.argv[1]), "other").enter()
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
print(child.pid, flush=True)
threading.Event().wait()
"""


@contextmanager
def other_server(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of its own, with a child that outlives it for as long as this lasts."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SERVER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            yield process
        finally:
            process.kill()
            os.kill(child, signal.SIGKILL)


def test_a_server_is_gone_when_it_was_killed_and_not_while_it_is_stopped(tmp_path: Path) -> None:
    holders = Holders(tmp_path, "me")
    holders.enter()
    with other_server(tmp_path) as process:
        assert not holders.is_gone("other")
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert not holders.is_gone("other")
        process.kill()
        process.wait()
        assert holders.is_gone("other")
        assert holders.is_gone("other")  # to look changes nothing


def test_two_servers_see_that_the_other_lives_and_nobody_is_gone_for_itself(tmp_path: Path) -> None:
    me, other = Holders(tmp_path, "me"), Holders(tmp_path, "other")
    for holders in (me, other, me):
        holders.enter()
    for holders in (me, other):
        assert not holders.is_gone("me")
        assert not holders.is_gone("other")


def test_a_server_that_has_left_leaves_nothing_and_nobody_can_tell(tmp_path: Path) -> None:
    me, other = Holders(tmp_path, "me"), Holders(tmp_path, "other")
    me.enter()
    other.enter()
    other.leave()
    assert [path.name for path in tmp_path.iterdir()] == ["me"]
    assert not me.is_gone("other")
    me.leave()
    me.leave()
    assert not list(tmp_path.iterdir())


def test_where_there_are_no_locks_nobody_can_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    me, other = Holders(tmp_path, "me"), Holders(tmp_path, "other")
    me.enter()

    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", none)
        other.enter()
    assert "No locks available" in caplog.text
    assert not me.is_gone("other")


def test_what_was_killed_long_ago_is_swept_and_what_lives_is_not(tmp_path: Path) -> None:
    old = Holders(tmp_path, "old")
    old.enter()
    for name in ("old", "long ago", "just now"):
        path = tmp_path / name
        path.touch()
        if name != "just now":
            before = path.stat().st_mtime - 2 * KEPT_SECONDS
            os.utime(path, (before, before))
    Holders(tmp_path, "me").enter()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["just now", "me", "old"]
