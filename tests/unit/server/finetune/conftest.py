import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from working import Run, Work, at_work, script, uninterrupted

sys.path.append(str(Path(__file__).parent.parent / "files"))  # uploads are made as their own tests make them


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a test's coroutine on a server at work, whose trainers do what is scripted; again, on the next server."""

    def run(test: Callable[[Work], Awaitable[None]], scripted: dict[str, Any] | None = None, **changes: Any) -> None:
        script(tmp_path, monkeypatch, **scripted or {})

        async def main() -> None:
            async with at_work(tmp_path, **changes) as work:
                await test(work)

        asyncio.run(main())

    return run


@pytest.fixture(scope="session")
def truth(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of `Work.create`'s job when nothing happens to it: once, since nothing but the job decides them."""
    return uninterrupted(tmp_path_factory.mktemp("uninterrupted"))
