import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from live_training import Run, Work, at_work, script


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a test's coroutine on training at work; `go` on what the script holds."""
    script(tmp_path, monkeypatch)

    def run(work: Callable[[Work], Awaitable[None]], scripted: dict[str, Any] | None = None, **changes: Any) -> None:
        script(tmp_path, monkeypatch, **scripted or {})

        async def main() -> None:
            async with at_work(tmp_path, **changes) as at:
                await work(at)

        asyncio.run(main())

    return run
