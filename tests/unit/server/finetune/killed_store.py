"""Processes that lead a job from its creation to its end and kill themselves (SIGKILL) before the n-th SQL statement.

python killed_store.py FOLDER N...; the one for N works in FOLDER/N and writes each step of the job's life into the file
`said` there once it is acknowledged. They are forks, so that imports are paid for once. Prints an exit code a line."""

import os
import signal
import sys
import traceback
from pathlib import Path

from job_makers import MODEL, PLAN, create, leases, opened, step

from server.finetune.leases import TRAIN, VALIDATE


def lead(folder: Path, last: int) -> None:
    with opened(folder) as store:
        count = 0

        def on_statement(_: str) -> None:
            nonlocal count
            count += 1
            if count == last:
                os.kill(os.getpid(), signal.SIGKILL)

        store.connection.set_trace_callback(on_statement)
        held = leases(store)
        create(store)
        print("created", flush=True)  # noqa: T201 - the test reads it
        job = held.claim(VALIDATE, MODEL, 100.0)
        assert job is not None
        held.validated(job, 101.0, PLAN, 2, "x")
        print("queued", flush=True)  # noqa: T201
        job = held.claim(TRAIN, MODEL, 102.0)
        assert job is not None
        print("running", flush=True)  # noqa: T201
        for number in (1, 2):
            held.stepped(job, 103.0, step(number), 2, checkpoint=True)
            print(f"step {number}", flush=True)  # noqa: T201
        held.succeeded(job, 104.0, model="ft:x", trained_tokens=20, result_file="file-1", notes=[])
        print("succeeded", flush=True)  # noqa: T201
        print("statements", count, flush=True)  # noqa: T201


def main(folder: Path, last: int) -> int:
    """The exit code of a process of its own."""
    folder.mkdir()
    child = os.fork()
    if child == 0:
        with (folder / "said").open("w") as said:
            os.dup2(said.fileno(), sys.stdout.fileno())
        try:
            lead(folder, last)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    for number in sys.argv[2:]:
        print(main(Path(sys.argv[1]) / number, int(number)), flush=True)  # noqa: T201
