"""A server that works on one job until it is killed: python killed_server.py FOLDER LEASE_SECONDS. Prints the job's id
and its trainer's process id once two steps are trained."""

import asyncio
import sys
from pathlib import Path

from working import at_work


async def main(folder: Path, lease_seconds: float) -> None:
    async with at_work(folder, lease_seconds=lease_seconds) as work:
        job = await work.create()
        await work.told(job, "Step 2/6")
        print(job.id, work.trainer_pid, flush=True)  # noqa: T201 - the test reads it
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), float(sys.argv[2])))
