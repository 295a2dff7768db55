"""The device under test. Without a GPU `gpu` tests skip, or run on the CPU with LONGWAVE_KERNEL_TESTS_ON_CPU=1.

The seed of the random inputs is fresh in every session and printed in the header; LONGWAVE_TEST_SEED repeats one.
"""

import os

import pytest
import torch

from .problems import SESSION_SEED

ON_CPU = os.environ.get("LONGWAVE_KERNEL_TESTS_ON_CPU") == "1"


def pytest_report_header() -> str:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return f"kernel tests: GPU {gpu}, LONGWAVE_TEST_SEED={SESSION_SEED}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() or ON_CPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture
def device() -> torch.device:
    """CUDA when there is one. Without one only the unmarked subset gets here, and it gets the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture
def cuda() -> torch.device:
    """For bodies that make no sense elsewhere (streams, graphs, tensors of several GB)."""
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA itself, not only a device")
    return torch.device("cuda", torch.cuda.current_device())
