"""Kernels compiled at run time: source -> cubin (NVRTC) -> cache on disk -> launch on torch's current stream.

`load(KernelVariant(name, arch, defines))` gives a callable Kernel. Importing this room needs neither CuPy nor a GPU,
and no torch: launching does.
"""

from typing import TYPE_CHECKING, Any

from attention_backend.jit.build import BuildResult, archs_named, build_variants, check, list_variants
from attention_backend.jit.cache import KernelCache, default_cache
from attention_backend.jit.errors import (
    CacheDirectoryError,
    CompileError,
    CudaHeadersError,
    CupyMissingError,
    JitError,
    LaunchError,
    SourceError,
    UnsupportedArchError,
)
from attention_backend.jit.report import CompileReport
from attention_backend.jit.spec import ARCHS, KERNELS_DIR, KernelSource, KernelVariant, arch_for, runs_on

if TYPE_CHECKING:
    from attention_backend.jit.launch import Kernel, load


def __getattr__(name: str) -> Any:
    if name not in ("Kernel", "load"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from attention_backend.jit import launch

    value = globals()[name] = getattr(launch, name)
    return value


__all__ = [
    "ARCHS",
    "KERNELS_DIR",
    "BuildResult",
    "CacheDirectoryError",
    "CompileError",
    "CompileReport",
    "CudaHeadersError",
    "CupyMissingError",
    "JitError",
    "Kernel",
    "KernelCache",
    "KernelSource",
    "KernelVariant",
    "LaunchError",
    "SourceError",
    "UnsupportedArchError",
    "arch_for",
    "archs_named",
    "build_variants",
    "check",
    "default_cache",
    "list_variants",
    "load",
    "runs_on",
]
