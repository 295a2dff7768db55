"""A kernel variant -> a shared library that runs it on a CPU, by g++, kept in the cache of compiled kernels."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from attention_backend.jit.environment import cache_root
from attention_backend.jit.spec import KERNELS_DIR, KernelVariant, capability_of

from .translate import translate

RUNTIME = Path(__file__).parent / "runtime"
_FLAGS = ("-std=c++17", "-march=x86-64-v3", "-fPIC", "-shared", "-w", "-fno-strict-aliasing")
# Traps: a misaligned vector, an index beyond its array. What is not written is no number.
_CHECKS = ("-fsanitize=alignment,bounds", "-fsanitize-undefined-trap-on-error", "-ftrivial-auto-var-init=pattern")


class EmulatorError(RuntimeError):
    """A kernel cannot be compiled for the emulator, or fails in it."""


def available() -> str | None:
    """Why kernels cannot be emulated here; None: they can."""
    if os.uname().machine != "x86_64":
        return f"fibers are switched by x86-64 instructions, this is {os.uname().machine}"
    return None if shutil.which("g++") else "it needs g++"


@cache
def runtime() -> ctypes.CDLL:
    """The scheduler and all that is no kernel. Kernels' libraries find its functions in the process."""
    sources = sorted(p for p in RUNTIME.iterdir() if p.is_file())
    text = "".join(p.read_text() for p in sources)
    library = _library("runtime", text, (str(RUNTIME / "runtime.cpp"), "-O2"))
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


@cache
def emulated(variant: KernelVariant, directory: Path = KERNELS_DIR) -> ctypes.CDLL:
    """The library of a kernel whose text is in `directory`.

    Raises EmulatorError with what g++ says, ValueError for a kernel that the translator does not know.
    """
    runtime()
    major, minor = capability_of(variant.arch)
    defines = (f"-D{name}={value}" for name, value in (*variant.defines, ("__CUDA_ARCH__", 100 * major + 10 * minor)))
    source = directory / f"{variant.kernel}.cuh"
    preprocessed = _run("g++", "-E", "-xc++", f"-I{RUNTIME / 'include'}", f"-I{KERNELS_DIR}", *defines, str(source))
    text = translate(preprocessed, variant.kernel)
    return ctypes.CDLL(str(_library(variant.kernel, text, ("-xc++", "-", f"-I{RUNTIME}", "-O1", *_CHECKS), text)))


def _library(name: str, text: str, arguments: tuple[str, ...], given: str = "") -> Path:
    """The library that g++ makes of these arguments, which `text` decides about."""
    device = (RUNTIME / "device.h").read_text() + (RUNTIME / "types.h").read_text()
    content = "\0".join((text, device, *_FLAGS, *arguments))
    place = cache_root() / "emulator" / f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:24]}.so"
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
            made = Path(scratch) / "library.so"
            _run("g++", *_FLAGS, *arguments, "-o", str(made), given=given)
            made.replace(place)
    return place


def _run(*command: str, given: str = "") -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulatorError(f"{' '.join(command)[:300]}:\n{done.stderr[:4000]}")
    return done.stdout
