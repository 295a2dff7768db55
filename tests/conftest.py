"""What every test shares: GPU tests skip without a GPU, the bundled model, and groups that stay in one process."""

from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
#: Folders whose tests share something expensive (servers; every core): pytest-xdist keeps each in one process.
GROUPS = {TESTS / "integration": "server", TESTS / "compile": "kernels"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for folder, group in GROUPS.items():
            if item.path.is_relative_to(folder):
                item.add_marker(pytest.mark.xdist_group(group))
        # The kernel tests decide for themselves: they can run on the CPU.
        if item.get_closest_marker("gpu") and not item.path.is_relative_to(TESTS / "kernels"):
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session")
def bundled_model() -> Path:
    """The folder of SmolLM2-135M-Instruct; converted once per machine, under a lock."""
    from models.bundled import ensure_converted

    return ensure_converted()
