"""Emulation where it is possible: x86-64 with g++, and no real GPU, whose kernels launchers would keep."""

import pytest
import torch

from .compile import available


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = "kernels run on the GPU itself" if torch.cuda.is_available() else available()
    for item in items:
        if reason is not None and item.path.parent.name == "emulator":
            item.add_marker(pytest.mark.skip(reason=reason))
