"""kill -9 between any two SQL statements: what was acknowledged is there, what was not is there whole or not at all,
and the next server brings the job to its end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from job_makers import MODEL, PLAN, leases, opened, step

from server.finetune.leases import TRAIN, VALIDATE, Killed, Stage
from server.finetune.records import Job, Status
from server.finetune.store import JobStore

HERE = Path(__file__).parent
NEVER = 10_000


def run(folder: Path, *lasts: int) -> list[int]:
    """The exit codes."""
    path = os.pathsep.join((str(HERE), str(HERE.parents[3])))
    process = subprocess.run(
        [sys.executable, str(HERE / "killed_store.py"), str(folder), *map(str, lasts)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    codes = [int(line) for line in process.stdout.splitlines()]
    assert len(codes) == len(lasts), process.stderr
    assert set(codes) <= {0, -signal.SIGKILL}, process.stderr
    return codes


def said_in(folder: Path) -> list[str]:
    return (folder / "said").read_text().splitlines()


@pytest.fixture(scope="module")
def statements(tmp_path_factory: pytest.TempPathFactory) -> int:
    folder = tmp_path_factory.mktemp("whole")
    assert run(folder, NEVER) == [0]
    return int(said_in(folder / str(NEVER))[-1].split()[1])


def finish(store: JobStore, job: Job) -> None:
    """What the next server does, long after the lease has lapsed."""
    held, now = leases(store, "server-b"), 1000.0

    def take(stage: Stage, now: float) -> Job:
        taken = held.claim(stage, MODEL, now)
        if isinstance(taken, Killed):
            taken = held.claim(stage, MODEL, now + 100)
        assert isinstance(taken, Job)
        return taken

    if job.status is Status.VALIDATING:
        taken = take(VALIDATE, now)
        held.validated(taken, now, PLAN, 2, "x")
    if not job.status.is_final:
        taken = take(TRAIN, now + 200)
        for number in (1, 2):
            held.stepped(taken, now + 300, step(number), 2, checkpoint=True)
        held.succeeded(taken, now + 301, model="ft:x", trained_tokens=20, result_file="file-1", notes=[])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_acknowledged_step_is_lost_and_the_job_comes_to_its_end(tmp_path: Path, statements: int) -> None:
    assert statements > 30
    lasts = range(1, statements + 1)
    assert set(run(tmp_path, *lasts)) == {-signal.SIGKILL}
    for last in lasts:
        folder = tmp_path / str(last)
        said = said_in(folder)
        with opened(folder) as store:
            assert store.connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            job = store.find("ftjob-1", "me")
            if job is None:
                assert said == []
                continue
            done = len(store.journal.steps(job.id))
            assert done >= sum(line.startswith("step") for line in said)
            assert len(store.journal.checkpoints(job.id, before_step=None, limit=9)) == done
            if "queued" in said:
                assert job.plan == PLAN
            if "succeeded" in said:
                assert job.status is Status.SUCCEEDED
            assert store.holds_adapter_of(job.id) == (job.status is Status.SUCCEEDED)
            finish(store, job)
            ended = store.get(job.id)
            assert (ended.status, ended.trained_tokens) == (Status.SUCCEEDED, 20)
            assert len(store.journal.steps(job.id)) == 2
