"""The device under test. Without a GPU `gpu` tests skip, or run on the CPU with LONGWAVE_KERNEL_TESTS_ON_CPU=1, or run
the kernels themselves there (python -m tests.emulator).

The seed of the random inputs is fresh in every session and printed with a failure; LONGWAVE_TEST_SEED repeats one.
"""

import os
from collections.abc import Generator

import pytest
import torch

from .problems import SESSION_SEED, Case

ON_CPU = os.environ.get("LONGWAVE_KERNEL_TESTS_ON_CPU") == "1"
EMULATED = os.environ.get("LONGWAVE_KERNEL_TESTS_EMULATED") == "1"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    report.sections.append(("random inputs", f"LONGWAVE_TEST_SEED={SESSION_SEED}"))
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() or ON_CPU or EMULATED:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session", autouse=True)
def kernels(request: pytest.FixtureRequest) -> None:
    """The kernels of all selected cases, compiled on all cores."""
    if torch.cuda.is_available():
        from .compile_ahead import compile_ahead

        cases: dict[bool, list[Case]] = {False: [], True: []}  # True: their gradients too
        for item in request.session.items:
            case = getattr(item, "callspec", None) and item.callspec.params.get("case")  # type: ignore[attr-defined]
            if item.get_closest_marker("gpu") and isinstance(case, Case):
                cases["test_backward" in item.path.name].append(case)
        compile_ahead(cases[False], cases[True])


@pytest.fixture
def device() -> torch.device:
    """CUDA when there is one. Without one only the unmarked subset gets here, and it gets the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture
def cuda() -> torch.device:
    """For bodies that make no sense elsewhere (streams, graphs, tensors of several GB)."""
    if EMULATED:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA itself, not only a device")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def hopper(cuda: torch.device) -> torch.device:
    if torch.cuda.get_device_capability(cuda) != (9, 0):
        pytest.skip("needs a Hopper GPU")
    return cuda
