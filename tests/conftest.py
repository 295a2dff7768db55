"""What every test shares: GPU tests skip without a GPU, the bundled model, HTTP clients that are made at once,
byte code of what child processes import, hypothesis without a clock, and which tests go to one process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import certifi
import pytest
import torch
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parent
TOGETHER = "tests/integration/shared_servers"

# By default an example that takes 200 ms fails its test, and so do ten that take a second to be drawn: on a machine
# that others use, too, any of them may.
settings.register_profile("without a clock", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("without a clock")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # The kernel tests decide for themselves: they can run on the CPU.
        if item.get_closest_marker("gpu") and not item.path.is_relative_to(TESTS / "kernels"):
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests in one process, as with --dist loadfile; so are those of the files that share servers, each of
    which takes half a minute of a CPU to start."""
    from xdist.scheduler import LoadFileScheduling

    class BySharing(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return TOGETHER if nodeid.startswith(TOGETHER) else super()._split_scope(nodeid)

    return BySharing(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="session", autouse=True)
def _one_certificate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing here speaks TLS, yet every HTTP client, in child processes too, reads all the authorities it finds: 40 ms
    of work each. Here there is one."""
    first, end, _ = Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----\n")
    authority = tmp_path_factory.mktemp("tls") / "one.pem"
    authority.write_text(first + end)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("SSL_CERT_FILE", str(authority))
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_proxy() -> Iterator[None]:
    """For servers of this machine, which are all that a test asks: HTTP clients, in child processes too, would go to
    the one that the caller's environment names."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.setenv(name, "127.0.0.1,localhost,::1")
        yield


@pytest.fixture(scope="session", autouse=True)
def _byte_code() -> Iterator[None]:
    """Child processes keep the byte code of what they import, and find that of the ones before, whatever the caller's
    environment says: a server and its engine take 12 s of a CPU to start, and 26 s where nothing has any."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        yield


@pytest.fixture(scope="session")
def bundled_model() -> Path:
    """The folder of SmolLM2-135M-Instruct; converted once per machine, under a lock."""
    from models.bundled import ensure_converted

    return ensure_converted()
