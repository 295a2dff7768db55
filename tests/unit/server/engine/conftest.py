"""What tests of whole engines share."""

import pytest
from cranked_engine import Engine


@pytest.fixture(params=[False, True], ids=["in turn", "overlapped"])
def _overlaps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step after step, and with a step launched while the one before runs."""
    monkeypatch.setattr(Engine, "overlaps", request.param)
