"""Registers the patched attention once, and offers the devices a test may run on."""

import pytest
import torch

from models.patching import register


@pytest.fixture(scope="session", autouse=True)
def _registered() -> None:
    register()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)
