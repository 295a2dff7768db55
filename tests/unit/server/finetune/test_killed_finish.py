"""kill -9 between any two of the writes that end a job: nothing is lost, nothing half listed, nothing left for ever."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from killed_finish import FINISHING, REMOVING, TAKING_BACK
from working import Run, Work, script, uninterrupted

from server.finetune import Job, Status
from server.finetune.results import result_file_id
from server.finetune.setbacks import MAX_CRASHES

# One process for all: they share what killed servers leave.
pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]

Leave = Callable[[str], str]
#: One before the model is in its place and one after; the rest are `make test-all`.
EVERYDAY = ("the result is counted", "the model is served")


def instants(names: Iterable[str]) -> list[Any]:
    return [name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.thorough) for name in names]


def killed(folder: Path, instant: str, training_type: str = "lora") -> str:
    """The id of its job."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "killed_finish.py"), str(folder), instant, training_type],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def remains(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, str]]:
    """The folder of a server killed at the instant, and its job's id. Each instant has one, which tests copy."""
    found: dict[str, tuple[Path, str]] = {}

    def remains(instant: str) -> tuple[Path, str]:
        if instant not in found:
            folder = tmp_path_factory.mktemp("killed")
            with pytest.MonkeyPatch.context() as monkeypatch:
                script(folder, monkeypatch)
                found[instant] = folder, killed(folder, instant)
        return found[instant]

    return remains


@pytest.fixture
def leave(remains: Callable[[str], tuple[Path, str]], tmp_path: Path) -> Leave:
    """Puts what a server leaves that is killed at the instant into the test's folder; the id of its job."""

    def leave(instant: str) -> str:
        folder, job_id = remains(instant)
        shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
        return job_id

    return leave


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    return uninterrupted(tmp_path_factory.mktemp("uninterrupted"), steps=2)


def left(work: Work) -> dict[str, list[str]]:
    """What is on the disk, listed and served."""
    finetune, files = work.folder / "finetune", work.folder / "files"
    return {
        "jobs": sorted(path.name for path in (finetune / "jobs").iterdir()),
        "adapters": sorted(path.name for path in (finetune / "adapters").glob("*")),
        "files": sorted(path.name for path in (files / "content").iterdir()),
        "listed": sorted(file.id for file in work.files.page("me", purpose=None, after=None, limit=9, order="asc")),
        "served": sorted(name for name, _, _ in work.loaded),
    }


def whole(job: Job, *, kept: bool) -> dict[str, list[str]]:
    """What has to be there when nothing has happened to the job and all is done."""
    files = sorted([job.request.training_file, *([result_file_id(job.id)] if kept else [])])
    adapters, served = ([job.id], [f"ft:base::{job.id[6:18]}"]) if kept else ([], [])
    return {"jobs": [], "adapters": adapters, "files": files, "listed": files, "served": served}


async def settled(work: Work, job: Job) -> None:
    await work.wait(job, lambda now: now.status.is_final and not work.job_folder(job).exists())


@pytest.mark.parametrize("instant", instants(FINISHING))
def test_a_job_killed_at_its_end_succeeds_with_the_same_model_once(
    run: Run, leave: Leave, weights: str, instant: str
) -> None:
    job_id = leave(instant)

    async def main(work: Work) -> None:
        job = await work.jobs.get(job_id, "me")
        await settled(work, job)
        done = await work.jobs.get(job_id, "me")
        assert (done.status, done.result_file) == (Status.SUCCEEDED, result_file_id(job.id))
        assert left(work) == whole(done, kept=True)
        stored, opened = work.files.read(result_file_id(job.id), "me")
        with opened:
            assert len(opened.read().splitlines()) == 3
        assert stored.examples == 2
        assert work.weights(job) == weights

    run(main)


@pytest.mark.parametrize("kind", ["lora", pytest.param("full", marks=pytest.mark.thorough)])
def test_a_job_that_is_killed_at_every_instant_of_its_end_keeps_its_model(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str, kind: str
) -> None:
    script(tmp_path, monkeypatch)
    before = [instant for instant in FINISHING if instant != "the job has succeeded"]
    assert len(before) > MAX_CRASHES
    (job_id,) = {killed(tmp_path, instant, kind) for instant in before}

    async def main(work: Work) -> None:
        done = await work.succeeded(await work.jobs.get(job_id, "me"))
        assert done.trained_tokens == 20
        place = tmp_path / "finetune" / ("models" if kind == "full" else "adapters") / job_id
        assert (place / "weights").read_text() == weights
        assert len(work.trained()) == 2  # no step was trained again
        await settled(work, done)
        assert place.exists()

    run(main)


@pytest.mark.parametrize("kind", [pytest.param("lora", marks=pytest.mark.thorough), "full"])
def test_a_result_that_is_in_its_place_needs_no_other_trainer(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Which would make it again, of a whole model with gigabytes that may not be free by then."""
    script(tmp_path, monkeypatch)
    job_id = killed(tmp_path, "the adapter is in its place", kind)

    async def main(work: Work) -> None:
        done = await work.succeeded(await work.jobs.get(job_id, "me"))
        assert done.trained_tokens == 20
        place = tmp_path / "finetune" / ("models" if kind == "full" else "adapters") / job_id
        assert (place / "weights").exists()
        assert len(work.loaded) == (0 if kind == "full" else 1)
        await settled(work, done)
        assert place.exists()

    run(main, worker="no_such_module")  # a trainer that is started ends at once


@pytest.mark.parametrize("instant", instants(name for name in FINISHING if name != "the job has succeeded"))
def test_a_job_killed_at_its_end_and_cancelled_then_leaves_nothing(run: Run, leave: Leave, instant: str) -> None:
    job_id = leave(instant)

    async def main(work: Work) -> None:
        job = await work.jobs.cancel(job_id, "me")
        await work.jobs.supervisor.tidy()
        await settled(work, job)
        assert left(work) == whole(job, kept=False)

    run(main, start=False)


@pytest.mark.parametrize("instant", TAKING_BACK)
def test_what_a_cancelled_job_left_is_taken_back_whenever_that_is_cut_short(
    run: Run, leave: Leave, tmp_path: Path, instant: str
) -> None:
    job_id = leave("the model is served")
    killed(tmp_path, instant)

    async def main(work: Work) -> None:
        job = await work.jobs.get(job_id, "me")
        assert job.status is Status.CANCELLED
        await settled(work, job)
        assert left(work) == whole(job, kept=False)

    run(main)


@pytest.mark.parametrize("instant", REMOVING)
def test_a_model_deleted_by_a_killed_server_is_gone(run: Run, leave: Leave, instant: str) -> None:
    job_id = leave(instant)

    async def main(work: Work) -> None:
        job = await work.jobs.get(job_id, "me")
        await work.jobs.supervisor.tidy()
        assert left(work) == whole(job, kept=True) | {"adapters": [], "served": []}

    run(main)
