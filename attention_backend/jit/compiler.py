"""CUDA C++ source -> cubin for one exact architecture, by NVRTC; no GPU needed. Knows no cache and no device."""

import hashlib
import json
import logging
import time
from dataclasses import dataclass
from functools import cache

from attention_backend.jit import bindings, headers, report
from attention_backend.jit.cubin import parameter_sizes, whole
from attention_backend.jit.errors import CompileError
from attention_backend.jit.report import CompileReport
from attention_backend.jit.sources import SourceSnapshot
from attention_backend.jit.spec import KernelVariant

#: Never -use_fast_math: kernels name the approximate instruction where they want one.
# --no-cache: where there is a driver, NVRTC keeps compiled programs in the driver's cache, and gives no log from there.
FLAGS = ("-std=c++17", "-default-device", "--no-source-include", "--no-cache", "--ptxas-options=-v")

_KEY_FORMAT = 1
_LOG = logging.getLogger("attention_backend.jit")


@dataclass(frozen=True, slots=True)
class Compiled:
    """A cubin with what the compiler said; `seconds` is the time it took."""

    cubin: bytes
    report: CompileReport
    seconds: float


def key(variant: KernelVariant, source: SourceSnapshot) -> str:
    """SHA-256 (hex) of everything that the cubin is a function of.

    Those are the source and every local header it includes, the defines, the flags, the architecture and the versions
    of NVRTC and of the CUDA headers.
    """
    nvrtc_version = bindings.nvrtc_version()
    content = {
        "format": _KEY_FORMAT,
        "kernel": variant.kernel,
        "arch": variant.arch,
        "defines": [[name, str(value)] for name, value in variant.defines],
        "flags": FLAGS,
        "nvrtc": nvrtc_version,
        "cuda_headers": headers.find(nvrtc_version[0]).version,
        "source": [source.name, source.text],
        "local_headers": source.headers,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@cache
def _builtins() -> None:
    nvrtc = bindings.nvrtc()
    program = nvrtc.createProgram("", "empty", [], [])
    try:
        nvrtc.compileProgram(program, ())
    finally:
        nvrtc.destroyProgram(program)


def _load_builtins() -> None:
    """NVRTC opens libnvrtc-builtins at its first compilation: alone, and not while another thread opens libnvrtc."""
    with bindings.LOADING:
        _builtins()


def compile_variant(variant: KernelVariant, source: SourceSnapshot) -> Compiled:
    """Compile a variant. Raises CompileError with the compiler's errors, or when the kernel is not as rooms agree.

    A cubin must hold one kernel, an `extern "C"` function with the name of its file.
    """
    nvrtc = bindings.nvrtc()
    include = headers.find(bindings.nvrtc_version()[0]).directory
    options = (
        f"-arch={variant.arch}",
        *FLAGS,
        f"-I{include}",
        *(f"-D{name}={value}" for name, value in variant.defines),
    )
    _load_builtins()
    started = time.perf_counter()
    program = nvrtc.createProgram(
        source.text,
        source.name,
        [text.encode() for _, text in source.headers],
        [name.encode() for name, _ in source.headers],
    )
    try:
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program).rstrip("\0 \n")
            raise CompileError(f"{variant} does not compile ({error}):\n{log}", log) from None
        log = nvrtc.getProgramLog(program).rstrip("\0 \n")
        cubin = whole(nvrtc.getCUBIN(program))
    finally:
        nvrtc.destroyProgram(program)
    seconds = time.perf_counter() - started
    kernels = report.entries(log)
    if kernels != (variant.kernel,):
        raise CompileError(
            f'{variant}: {source.name} must hold one kernel, extern "C" __global__ {variant.kernel}; '
            f"found {', '.join(kernels) or 'none'}",
            log,
        )
    compiled = Compiled(cubin, report.parse(log, parameter_sizes(cubin, variant.kernel)), seconds)
    _LOG.info("compiled %s in %.2f s: %s", variant, seconds, compiled.report)
    return compiled
