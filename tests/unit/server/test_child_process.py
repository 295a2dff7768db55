"""What a worker process finds in its environment, and what that is good for."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from server import child_process

PRINTS = """
import os, pathlib, sys
pathlib.Path(sys.argv[1]).write_text(" ".join(os.environ.get(name, "unset") for name in sys.argv[2:]))
"""

GROWS = """
import pathlib, sys
import torch
from torch import nn
from models.packed_linear import PackedLinear

def megabytes():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

dtype = torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
layers = [PackedLinear(nn.Linear(256, out).to(dtype)) for out in (256, 384, 512, 1024)]
with torch.inference_mode():
    for rows in range(1, 300):
        for layer in layers:
            layer(torch.ones(rows, 256, dtype=dtype))
        if rows == 100:
            before = megabytes()
pathlib.Path(sys.argv[1]).write_text(str(megabytes() - before))
"""


Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """(source, its arguments) -> what a worker of that source has written."""
    monkeypatch.syspath_prepend(tmp_path)

    def worker(source: str, *arguments: str, defaults: dict[str, str] | None = None) -> str:
        (tmp_path / "a_worker.py").write_text(source)
        written = tmp_path / "written"
        process = child_process.spawn(
            "a_worker", [str(written), *arguments], cache_dir=None, files=(), defaults=defaults
        )
        assert process.wait(timeout=120) == 0
        return written.read_text()

    return worker


def test_the_operators_environment_comes_before_what_a_worker_finds_by_default(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in child_process.PRODUCTS:
        monkeypatch.delenv(name, raising=False)
    names = [*child_process.PRODUCTS, "GOMP_SPINCOUNT"]
    assert run(PRINTS, *names) == "128 128 unset"
    assert run(PRINTS, *names, defaults=child_process.WAITING) == "128 128 1000"
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    assert run(PRINTS, *names) == "7 128 unset"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_worker_does_not_grow_with_every_number_of_rows(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It grew by 395 to 407 MB with the caches' own limits."""
    for name in child_process.PRODUCTS:
        monkeypatch.delenv(name, raising=False)
    assert float(run(GROWS)) < 80  # bfloat16 9 to 20, float32 18 to 46
