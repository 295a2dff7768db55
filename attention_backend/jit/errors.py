"""What can go wrong between a kernel's source and its launch, one class each.

JitError
├── CupyMissingError       the CPU-only install was asked for a CUDA kernel
├── UnsupportedArchError   no kernels are written for this GPU
├── CudaHeadersError       NVRTC is here, the CUDA headers it needs are not
├── SourceError            a kernel's source, or what it includes, cannot be read or hashed
├── CompileError           NVRTC refused the source; `log` is what it said
├── CacheDirectoryError    the cache directory cannot be trusted or written
└── LaunchError            a kernel cannot be loaded on the device, or its arguments do not fit it
"""


class JitError(RuntimeError):
    """Base of everything that attention_backend.jit raises on purpose."""


class CupyMissingError(JitError):
    """CuPy or NVRTC is not installed."""

    def __init__(self, cause: str) -> None:
        super().__init__(
            f"CUDA kernels need CuPy and NVRTC, which are not usable here ({cause}); install them, in the "
            "checkout, with make install (where there is a GPU) or pip install -c constraints.txt -e '.[cuda]'"
        )


class UnsupportedArchError(JitError, NotImplementedError):
    """The GPU's compute capability, or the name of an architecture, is not one kernels are built for."""


class CudaHeadersError(JitError):
    """cuda_fp16.h and its neighbours were not found."""


class SourceError(JitError):
    """A kernel's source cannot be read, or has an include that cannot be hashed."""


class CompileError(JitError):
    """NVRTC refused a kernel. The message holds the compiler's errors with file and line; `log` is all it said."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class CacheDirectoryError(JitError):
    """The directory for compiled kernels is missing, not writable, or could be written by somebody else."""


class LaunchError(JitError):
    """A kernel cannot be loaded on this device, or was called with arguments that do not fit its parameters."""
