"""Makes a child process end when its parent does, however that ends (kill -9 included). Linux by prctl; everywhere by
looking. Knows nothing of engines."""

import ctypes
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1
POLL_INTERVAL = 1.0  # seconds


def die_with_parent(parent_pid: int) -> None:
    """The kernel's signal works even while this process hangs in a driver call; the watcher where there is none.

    The signal is tied to the parent's *thread* that started this process: start it from one that stays."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it ended before the call above
        os._exit(1)
    threading.Thread(target=_watch, args=(parent_pid,), name="parent-watch", daemon=True).start()


def _watch(parent_pid: int) -> None:
    never = threading.Event()
    while os.getppid() == parent_pid:
        never.wait(POLL_INTERVAL)
    os._exit(1)
