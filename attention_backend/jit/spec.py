"""What a compiled kernel is a function of: its source file, the GPU architecture and its -D defines.

Knows no compiler and no device.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from attention_backend.jit.errors import SourceError, UnsupportedArchError

#: Every architecture kernels are built for. An `a` (sm_90a: wgmma, setmaxnreg) runs on exactly that GPU.
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")

#: The folder whose `<name>.cuh` files are kernels; includes are resolved from here.
KERNELS_DIR = Path(__file__).resolve().parent.parent / "kernels"

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class KernelSource:
    """The entry file of a kernel; its stem is the name of its one `extern "C" __global__` function."""

    name: str
    source_path: Path

    @classmethod
    def named(cls, name: str, directory: Path = KERNELS_DIR) -> "KernelSource":
        """The source of kernel `name`. Raises SourceError when there is no such file."""
        path = directory / f"{name}.cuh"
        if not _IDENTIFIER.fullmatch(name) or not path.is_file():
            raise SourceError(f"there is no kernel {name!r}: {path} is not a file")
        return cls(name, path)


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """One cubin: a kernel compiled for an architecture with its defines (their order does not matter).

    A `hot` variant must compile without spills and without local memory (see jit.build.check).
    """

    kernel: str
    arch: str
    defines: tuple[tuple[str, str | int], ...] = ()
    hot: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if self.arch not in ARCHS:
            raise UnsupportedArchError(f"unknown architecture {self.arch!r}: kernels are built for {', '.join(ARCHS)}")
        names = [name for name, _ in self.defines]
        for name in names:
            if not _IDENTIFIER.fullmatch(name):
                raise ValueError(f"{name!r} is not the name of a macro")
        if len(set(names)) != len(names):
            raise ValueError(f"a macro is defined twice in {names}")
        object.__setattr__(self, "defines", tuple(sorted((name, _macro(value)) for name, value in self.defines)))

    def __str__(self) -> str:
        defines = ", ".join(f"{name}={value}" for name, value in self.defines)
        return f"{self.kernel}[{self.arch}{', ' if defines else ''}{defines}]"


def _macro(value: str | int) -> str | int:
    """True and False become 1 and 0, as the preprocessor knows no booleans."""
    return int(value) if isinstance(value, int) else value


def capability_of(arch: str) -> tuple[int, int]:
    """`sm_90a` -> (9, 0)."""
    digits = arch.removeprefix("sm_").rstrip("a")
    return int(digits[:-1]), int(digits[-1])


def arch_for(capability: tuple[int, int]) -> str:
    """The architecture to compile for on a GPU of this compute capability.

    A minor version without kernels of its own gets the nearest lower one of its major version, whose cubins it runs
    (8.7 -> sm_86, 10.3 -> sm_100, 12.1 -> sm_120). Raises UnsupportedArchError otherwise.
    """
    fitting = [arch for arch in ARCHS if runs_on(arch, capability)]
    if not fitting:
        major, minor = capability
        raise UnsupportedArchError(
            f"no kernels for a GPU of compute capability {major}.{minor}: they are built for {', '.join(ARCHS)}"
        )
    return max(fitting, key=capability_of)


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Whether a cubin for `arch` runs on a GPU of this compute capability."""
    major, minor = capability_of(arch)
    if arch.endswith("a"):
        return capability == (major, minor)
    return capability[0] == major and capability[1] >= minor
