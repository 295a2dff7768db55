"""A process that leads a job from its creation to its end and kills itself (SIGKILL) before the n-th SQL statement.

python killed_store.py FOLDER N; prints each step of the job's life once it is acknowledged."""

import os
import signal
import sys
from pathlib import Path

from job_makers import MODEL, PLAN, create, leases, opened, step

from server.finetune.leases import TRAIN, VALIDATE


def main(folder: Path, last: int) -> None:
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


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
