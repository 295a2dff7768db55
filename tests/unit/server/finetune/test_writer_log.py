"""What a writer that cannot write says, to whom, and how often."""

import asyncio
import logging
from pathlib import Path

import pytest

from server.errors import InsufficientStorage, StorageBusy
from server.finetune import database, writer
from server.finetune.store import JobStore
from server.finetune.writer import Writer


def test_a_failure_is_said_once_a_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jobs").touch()  # no folder

    async def tries(one: Writer, count: int) -> int:
        caplog.clear()
        for _ in range(count):
            with pytest.raises(InsufficientStorage):
                await one.store(lambda _: None)
        return len([record for record in caplog.records if record.levelno == logging.ERROR])

    async def main() -> None:
        one = Writer(tmp_path / "jobs", "me", 1.0, 1.0)
        assert await tries(one, 5) == 1
        assert await tries(one, 5) == 0
        monkeypatch.setattr(writer, "SAID_AGAIN", 0.0)
        assert await tries(one, 2) == 2
        await one.close()

    with caplog.at_level(logging.INFO, logger="longwave"):
        asyncio.run(main())


def test_who_waits_for_another_server_that_holds_the_jobs_is_told_to_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.1)

    def write(store: JobStore) -> None:
        with store.transaction():
            pass

    async def main() -> None:
        one = Writer(tmp_path / "jobs", "me", 1.0, 1.0)
        await one.store(write)
        held = database.connect(tmp_path / "jobs" / "jobs.sqlite3")
        held.execute("BEGIN IMMEDIATE")
        with pytest.raises(StorageBusy) as refused:
            await one.store(write)
        assert int(refused.value.headers()["retry-after"]) > 0
        held.close()
        await one.store(write)
        await one.close()

    asyncio.run(main())
