"""What the compiler said about one kernel: registers, spills, local and shared memory, warnings. Knows no compiler."""

import re
from dataclasses import dataclass

# ptxas messages that cost a large factor, by their words: wgmma serialised has ten codes, and C7517 and C7519 between
# them say only that ptxas adds a wait.
_WGMMA = re.compile(r"wgmma\.mma_async instructions are serialized|'setmaxnreg' ignored")

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_REGISTERS = re.compile(r"Used (\d+) registers")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_CUMULATIVE_STACK = re.compile(r"(\d+) bytes cumulative stack size")
_SHARED = re.compile(r"(\d+) bytes smem")
_CODE = re.compile(r"\((C\d{4})\)")
_WARNING = re.compile(r"\bwarning\s*[#:]", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class CompileReport:
    """One kernel as ptxas built it.

    * registers: per thread
    * spill_bytes: spill stores plus spill loads, bytes of instructions' operands
    * local_bytes: stack of a thread, spills included
    * static_smem: bytes of `__shared__` variables per block
    * parameter_sizes: bytes of each kernel parameter
    * warnings: one line each, of the front end and of ptxas
    """

    registers: int
    spill_bytes: int
    local_bytes: int
    static_smem: int
    parameter_sizes: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def wgmma_warnings(self) -> tuple[str, ...]:
        """The warnings that wgmma was serialised or setmaxnreg ignored."""
        return tuple(line for line in self.warnings if _WGMMA.search(line))


def entries(log: str) -> tuple[str, ...]:
    """Names of the kernels that ptxas compiled, from its verbose log."""
    return tuple(_ENTRY.findall(log))


def parse(log: str, parameter_sizes: tuple[int, ...]) -> CompileReport:
    """The report of a verbose (`--ptxas-options=-v`) log of one kernel. Raises ValueError when it is of none."""
    registers = [int(n) for n in _REGISTERS.findall(log)]
    frames = [tuple(map(int, numbers)) for numbers in _FRAME.findall(log)]  # one per function that was not inlined
    if not registers or not frames:
        raise ValueError("the compiler's log has no register counts")
    stacks = [frame for frame, _, _ in frames] + [int(n) for n in _CUMULATIVE_STACK.findall(log)]
    return CompileReport(
        registers=max(registers),
        spill_bytes=sum(stores + loads for _, stores, loads in frames),
        local_bytes=max(stacks),
        static_smem=max((int(n) for n in _SHARED.findall(log)), default=0),
        parameter_sizes=parameter_sizes,
        warnings=tuple(line.strip() for line in log.splitlines() if _WARNING.search(line) or _CODE.search(line)),
    )
