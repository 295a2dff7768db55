"""A pytest plugin that runs the tests of kernels in the emulator; `python -m tests.emulator` loads it."""

from collections.abc import Generator

import pytest

from .device import Settings, emulated_device

_NEEDS_A_GPU = (
    "Torch not compiled with CUDA",
    "requires CUDA support",
    "dummy base class",
    "CUDA driver",
    "NVIDIA driver",
    "libcuda",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("emulator")
    group.addoption("--emulated-capability", default="9.0", help="compute capability of the GPU that is none")
    group.addoption("--emulated-sms", type=int, default=4, help="its multiprocessors")
    group.addoption("--emulated-seed", type=int, default=0, help="the order of threads and copies")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    options = item.config.option
    major, minor = map(int, options.emulated_capability.split("."))
    with emulated_device(Settings((major, minor), options.emulated_sms, options.emulated_seed)):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    try:
        yield
    except (AssertionError, RuntimeError, OSError) as error:
        if any(words in str(error) for words in _NEEDS_A_GPU):  # streams, graphs
            pytest.skip(f"needs a GPU, not its kernels alone: {str(error)[:80]}")
        raise
