"""The file of jobs: what survives power loss, and what is refused and left as it is."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from job_makers import create, opened

from server.errors import InsufficientStorage
from server.finetune.database import DatabaseError, connect
from server.finetune.writer import Writer


def test_it_is_wal_and_synced_at_every_commit(tmp_path: Path) -> None:
    with closing(connect(tmp_path / "jobs.sqlite3")) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL


def test_a_later_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        create(store)
        store.connection.execute("PRAGMA user_version=2")
    with pytest.raises(DatabaseError, match="version 2"):
        connect(tmp_path / "jobs.sqlite3")
    with closing(sqlite3.connect(tmp_path / "jobs.sqlite3")) as connection:
        assert connection.execute("SELECT id FROM jobs").fetchall() == [("ftjob-1",)]


def test_a_damaged_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite3"
    with opened(tmp_path) as store:
        for number in range(50):
            create(store, f"ftjob-{number}", metadata={"x": "y" * 400})
    damaged = bytearray(path.read_bytes())
    damaged[4096 * 3 : 4096 * 8] = b"\xa5" * 4096 * 5
    path.write_bytes(damaged)
    with pytest.raises((DatabaseError, sqlite3.DatabaseError)):
        connect(path)
    assert path.read_bytes() == damaged


@pytest.mark.parametrize("made", ["adapters/ftjob-1", "models/ftjob-1", "jobs/x/run/1"])
@pytest.mark.parametrize("left", [None, b""])
def test_what_jobs_have_made_is_left_alone_where_their_file_is_lost(
    tmp_path: Path, made: str, left: bytes | None
) -> None:
    """It would be of jobs that nobody knows, and go."""
    tmp_path.chmod(0o700)
    (tmp_path / made).mkdir(parents=True)
    path = tmp_path / "jobs.sqlite3"
    if left is not None:
        path.write_bytes(left)

    async def main() -> None:
        one = Writer(tmp_path, "me", 1.0, 1.0)
        for _ in range(2):
            with pytest.raises(InsufficientStorage):
                await one.store(lambda store: store.counts())
        path.unlink()
        connect(path).close()  # as who puts it back
        assert await one.store(lambda store: store.counts())
        path.unlink()  # under a server that runs
        with pytest.raises(InsufficientStorage):
            await one.store(lambda store: store.counts())
        await one.close()

    asyncio.run(main())


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite3"
    path.write_bytes(b"not a database, but long enough to be looked at" * 100)
    with pytest.raises(sqlite3.DatabaseError):
        connect(path)
    assert path.read_bytes().startswith(b"not a database")
