"""kill -9 at every instant of an upload and of a delete: a file is whole and listed, or it is not there."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from killed_upload import INSTANTS
from training_files import PAIR, kept, listed, opened, upload

HERE = Path(__file__).parent


@pytest.mark.parametrize("instant", INSTANTS)
def test_a_killed_server_leaves_whole_files_only(tmp_path: Path, instant: str) -> None:
    path = os.pathsep.join((str(HERE), str(HERE.parents[3])))
    process = subprocess.run(
        [sys.executable, str(HERE / "killed_upload.py"), str(tmp_path), instant],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == -signal.SIGKILL, process.stderr
    before = process.stdout.split()
    left = kept(tmp_path)
    assert len(left) == (1 if instant == "unlisted" else 2)
    assert len(before) == 1

    with opened(tmp_path) as store:
        assert kept(tmp_path) == sorted(listed(store))  # swept
        wanted = {"listed": 2, "unlisted": 0}.get(instant, 1)
        assert len(listed(store)) == wanted
        for file_id in listed(store):
            with store.read(file_id, "")[1] as file:
                assert file.read() == PAIR * 50
        upload(store, PAIR)
        assert len(listed(store)) == wanted + 1
