"""Finds the CUDA headers (cuda_fp16.h, cuda_bf16.h, ...) that fit an NVRTC: in a pip wheel or in a toolkit."""

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from attention_backend.jit.environment import JitEnvironment
from attention_backend.jit.errors import CudaHeadersError

_VERSION = re.compile(r"^#define\s+CUDA_VERSION\s+(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CudaHeaders:
    """`version` is cuda.h's CUDA_VERSION: 13000 for CUDA 13.0."""

    directory: Path
    version: int


@cache
def find(nvrtc_major: int) -> CudaHeaders:
    """Headers of NVRTC's major version: the wheel nvidia-cuda-runtime, then CUDA_PATH, then /usr/local/cuda.

    Raises CudaHeadersError naming every directory that was looked at.
    """
    seen = []
    for directory in _candidates(nvrtc_major):
        version = _version_in(directory)
        if version is not None and version // 1000 == nvrtc_major:
            return CudaHeaders(directory, version)
        seen.append(f"{directory} ({'missing' if version is None else f'CUDA {version // 1000}'})")
    raise CudaHeadersError(
        f"no headers of CUDA {nvrtc_major} for NVRTC; looked in {', '.join(seen)}. Install them, in the "
        "checkout, with make install (where there is a GPU) or pip install -c constraints.txt -e '.[cuda]', or point "
        "CUDA_PATH at a toolkit"
    )


def _candidates(nvrtc_major: int) -> Iterator[Path]:
    wheels = importlib.util.find_spec("nvidia")  # a namespace package of every NVIDIA wheel
    for location in (wheels.submodule_search_locations or []) if wheels else []:
        yield Path(location) / f"cu{nvrtc_major}" / "include"
    for toolkit in JitEnvironment.read().toolkits:
        yield toolkit / "include"


def _version_in(directory: Path) -> int | None:
    if not (directory / "cuda_fp16.h").is_file() or not (directory / "cuda.h").is_file():
        return None
    found = _VERSION.search((directory / "cuda.h").read_text(encoding="utf-8", errors="replace"))
    return int(found[1]) if found else None
