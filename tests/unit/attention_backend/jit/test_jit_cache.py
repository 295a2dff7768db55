"""Artefacts on disk: whole or absent, whatever happens to the processes that write them."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cupy")

from attention_backend.jit import CacheDirectoryError, CompileError, KernelCache, KernelVariant
from attention_backend.jit.build import build_variants

SCALE = KernelVariant("scale", "sm_90a", (("TIMES", 3),))

# argv: cache, kernels, number of processes, "locks" or "no locks"
RACE = """
import contextlib, os, sys
from pathlib import Path
from attention_backend.jit import KernelCache, KernelVariant, cache as module

cache = KernelCache(Path(sys.argv[1]), sources=Path(sys.argv[2]))
if sys.argv[4] == "no locks":
    module._locked = lambda place, key: contextlib.nullcontext()
start_read, start_write = os.pipe()
children = []
for _ in range(int(sys.argv[3])):
    child = os.fork()
    if child == 0:
        os.close(start_write)
        os.read(start_read, 1)  # returns for all at once, when the parent closes its end
        found = cache.get(KernelVariant("scale", "sm_90a", (("TIMES", 3),)))
        os.write(1, f"{found.cached} {found.artefact.key}\\n".encode())
        os._exit(0)
    children.append(child)
os.close(start_write)
sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""

# argv: cache, kernels, the function to stop in, its module
STOP = """
import importlib, sys, threading
from pathlib import Path
from attention_backend.jit import KernelCache, KernelVariant

def stop(*_):
    print("stopped", flush=True)
    threading.Event().wait()

setattr(importlib.import_module(sys.argv[4]), sys.argv[3], stop)
KernelCache(Path(sys.argv[1]), sources=Path(sys.argv[2])).get(KernelVariant("scale", "sm_90a", (("TIMES", 3),)))
"""


def artefacts_in(path: Path) -> list[Path]:
    return [entry for entry in path.iterdir() if not entry.name.startswith(".")]


def test_a_kernel_is_compiled_once_and_then_read(cache: KernelCache) -> None:
    assert cache.find(SCALE) is None
    first, second = cache.get(SCALE), cache.get(SCALE)
    assert (first.cached, second.cached) == (False, True)
    assert first.artefact == second.artefact == cache.find(SCALE)


def test_looking_for_a_kernel_writes_nothing(cache: KernelCache, cache_path: Path) -> None:
    assert cache.find(SCALE) is None
    assert not cache_path.exists()


def test_the_manifest_tells_what_the_cubin_is(cache: KernelCache, cache_path: Path) -> None:
    artefact = cache.get(SCALE).artefact
    manifest = json.loads((cache_path / artefact.key / "manifest.json").read_text())
    assert manifest["key"] == artefact.key
    assert manifest["description"] == "scale[sm_90a, TIMES=3]"
    assert manifest["report"]["registers"] == artefact.report.registers
    assert manifest["report"]["local_bytes"] == 0


def test_a_changed_header_is_another_kernel(cache: KernelCache, kernels: Path) -> None:
    before = cache.get(SCALE).artefact
    (kernels / "parts/depth.cuh").write_text("#pragma once\n#define DEPTH 5\n")
    after = cache.get(SCALE)
    assert not after.cached
    assert after.artefact.key != before.key
    assert after.artefact.cubin != before.cubin


def test_a_kernel_that_does_not_compile_leaves_nothing(cache: KernelCache, kernels: Path, cache_path: Path) -> None:
    (kernels / "scale.cuh").write_text("#error not today\n")
    with pytest.raises(CompileError, match="not today"):
        cache.get(SCALE)
    assert artefacts_in(cache_path) == []


@pytest.mark.parametrize(
    "damage",
    [
        "truncated", "flipped", "empty", "no cubin", "no manifest", "torn manifest", "other manifest", "list manifest",
        "number in words", "other report", "a file instead", "a folder instead of the manifest",
    ],
)  # fmt: skip
def test_a_damaged_artefact_is_compiled_again(cache: KernelCache, cache_path: Path, damage: str) -> None:
    good = cache.get(SCALE).artefact
    cubin, manifest = cache_path / good.key / "kernel.cubin", cache_path / good.key / "manifest.json"
    match damage:
        case "truncated":
            cubin.write_bytes(good.cubin[:-100])
        case "flipped":
            cubin.write_bytes(good.cubin[:1000] + bytes([good.cubin[1000] ^ 1]) + good.cubin[1001:])
        case "empty":
            cubin.write_bytes(b"")
        case "no cubin":
            cubin.unlink()
        case "no manifest":
            manifest.unlink()
        case "torn manifest":
            manifest.write_bytes(manifest.read_bytes()[:50])
        case "other manifest":
            manifest.write_text(manifest.read_text().replace(good.key, "0" * 64))
        case "list manifest":
            manifest.write_text("[]")
        case "number in words":
            manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "seconds": "some"}))
        case "other report":
            manifest.write_text(manifest.read_text().replace('"registers": ', '"registers": 1'))
        case "a file instead":
            shutil.rmtree(cache_path / good.key)
            (cache_path / good.key).touch()
        case "a folder instead of the manifest":
            manifest.unlink()
            manifest.mkdir()
    assert cache.find(SCALE) is None
    repaired = cache.get(SCALE)
    assert not repaired.cached
    assert repaired.artefact.cubin == good.cubin
    assert cache.get(SCALE).cached
    assert artefacts_in(cache_path) == [cache_path / good.key]
    assert list((cache_path / ".scratch").iterdir()) == []


def test_a_kernel_that_finds_no_room_on_the_disk_is_served_all_the_same(
    cache: KernelCache, cache_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("attention_backend.jit.artefact._write_durably", full)
        found = [cache.get(SCALE) for _ in range(2)]
        with pytest.raises(CacheDirectoryError, match="cannot be written"):
            build_variants([SCALE], cache)
    assert [(one.cached, one.kept) for one in found] == [(False, False)] * 2
    assert [message for message in caplog.messages if "No space left" in message]
    assert list((cache_path / ".scratch").iterdir()) == []
    kept = cache.get(SCALE)
    assert kept.kept
    assert kept.artefact.cubin == found[0].artefact.cubin


def test_an_image_is_read_first_and_never_written(cache_path: Path, kernels: Path, tmp_path: Path) -> None:
    image = tmp_path / "image"
    KernelCache(image, sources=kernels).get(SCALE)
    before = sorted(path for path in image.rglob("*"))
    cache = KernelCache(cache_path, image=image, sources=kernels)
    assert cache.get(SCALE).cached
    assert not cache_path.exists()
    other = KernelVariant("scale", "sm_80", (("TIMES", 3),))
    assert not cache.get(other).cached
    assert cache.get(other).cached
    assert sorted(path for path in image.rglob("*")) == before


def test_a_damaged_kernel_of_an_image_is_compiled_into_the_cache(
    cache_path: Path, kernels: Path, tmp_path: Path
) -> None:
    image = tmp_path / "image"
    key = KernelCache(image, sources=kernels).get(SCALE).artefact.key
    (image / key / "kernel.cubin").write_bytes(b"damaged")
    cache = KernelCache(cache_path, image=image, sources=kernels)
    assert not cache.get(SCALE).cached
    assert artefacts_in(cache_path) == [cache_path / key]
    assert (image / key / "kernel.cubin").read_bytes() == b"damaged"


@pytest.mark.parametrize("locks", ["locks", "no locks"])
def test_eight_processes_on_an_empty_cache_end_with_one_valid_artefact(
    cache: KernelCache, cache_path: Path, kernels: Path, locks: str
) -> None:
    arguments = [str(cache_path), str(kernels), "8", locks]
    done = subprocess.run(
        [sys.executable, "-c", RACE, *arguments], capture_output=True, text=True, check=True, cwd=_ROOT, timeout=120
    )
    answers = [line.split() for line in done.stdout.splitlines()]
    assert len(answers) == 8
    assert len({key for _, key in answers}) == 1
    if locks == "locks":
        assert sorted(cached for cached, _ in answers) == ["False"] + ["True"] * 7
    assert artefacts_in(cache_path) == [cache_path / answers[0][1]]
    assert cache.get(SCALE).cached
    assert list((cache_path / ".scratch").iterdir()) == []


@pytest.mark.parametrize(
    ("function", "module"),
    [
        ("compile_variant", "attention_backend.jit.compiler"),  # killed while NVRTC works, holding the key's lock
        ("_sync_directory", "attention_backend.jit.artefact"),  # killed with both files written, before the rename
    ],
)
def test_a_process_killed_while_compiling_leaves_no_half_artefact_and_no_lock(
    cache: KernelCache, cache_path: Path, kernels: Path, function: str, module: str
) -> None:
    arguments = [str(cache_path), str(kernels), function, module]
    with subprocess.Popen([sys.executable, "-c", STOP, *arguments], stdout=subprocess.PIPE, cwd=_ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"stopped\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert artefacts_in(cache_path) == []
    assert cache.find(SCALE) is None
    assert not cache.get(SCALE).cached
    assert cache.get(SCALE).cached


def test_what_killed_processes_left_a_day_ago_is_removed(cache: KernelCache, cache_path: Path) -> None:
    abandoned, recent = cache_path / ".scratch/abandoned", cache_path / ".scratch/recent"
    for path in (abandoned, recent):
        path.mkdir(parents=True, mode=0o700)
        (path / "kernel.cubin").touch()
    for path in (cache_path, cache_path / ".scratch"):
        path.chmod(0o700)
    os.utime(abandoned, (0, 0))
    cache.get(SCALE)
    assert list((cache_path / ".scratch").iterdir()) == [recent]


_ROOT = Path(__file__).resolve().parents[4]
