"""Who is timed in which section. A contender is a function that turns a cell and its tensors into a call.

A contender that cannot run a cell raises; the reason is recorded beside the cells it can run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec

from torch import Tensor

from benchmarks.attention_cells import Cell, dense_twin
from benchmarks.attention_inputs import Tensors

Output = Tensor | tuple[Tensor, Tensor, Tensor]  # shaped like q; of a backward the gradients of q, k and v
Call = Callable[[], Output]
Make = Callable[[Cell, Tensors], Call]

OURS, OURS_GENERIC, OURS_CONTIGUOUS = "longwave", "longwave-generic", "longwave-contiguous"
OURS_DETERMINISTIC = "longwave-deterministic"
OURS_DENSE, OURS_KERNEL, OURS_BF16, OURS_UNSHARED = (
    "longwave-dense",
    "longwave-kernel",
    "longwave-bf16",
    "longwave-unshared",
)
CUDNN, FA2, MEM_EFF, FLEX, PER_TENSOR = "cudnn", "fa2", "mem-eff", "flex", "per-tensor"
FA3, FA4, FLASHINFER = "fa3", "fa4", "flashinfer"
CASCADE = "flashinfer-cascade"

#: Packages that are timed where they can be imported, and what they are called there. Nothing of ours needs them, and
#: not all of them can be imported in one process: a run times those of its PYTHONPATH.
PACKAGES = {FA3: "flash_attn_interface", FA4: "flash_attn.cute", FLASHINFER: "flashinfer"}


@dataclass
class Contender:
    """`makes` has one function per section; in the sections of `twins` it runs the cell's dense twin; those of
    `optional` are timed when asked for, being slow and no bar."""

    name: str
    makes: dict[str, Make] = field(default_factory=dict)
    twins: set[str] = field(default_factory=set)
    optional: set[str] = field(default_factory=set)

    @property
    def ours(self) -> bool:
        return self.name.startswith(OURS)

    @property
    def package(self) -> str | None:
        """What must be importable, where it is not torch itself."""
        return PACKAGES.get(self.name.partition("-")[0])

    def cell(self, cell: Cell) -> Cell:
        """The problem that this contender runs where others run `cell`."""
        return dense_twin(cell) if cell.section in self.twins else cell


REGISTRY: dict[str, Contender] = {}


def contender(name: str, *sections: str, twin: bool = False, optional: bool = False) -> Callable[[Make], Make]:
    """Registers a function for some sections; a contender can have others for other sections."""

    def register(make: Make) -> Make:
        entry = REGISTRY.setdefault(name, Contender(name))
        for section in sections:
            entry.makes[section] = make
        entry.twins |= set(sections) if twin else set()
        entry.optional |= set(sections) if optional else set()
        return make

    return register


def found(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ImportError:  # its parent package is missing or broken
        return False


def peers_found() -> dict[str, bool]:
    """The optional packages by their contender's name, and whether they can be imported here."""
    return {name: found(package) for name, package in PACKAGES.items()}


def peer_versions() -> dict[str, str]:
    """Of the packages that can be imported; "unknown" for one that was not installed but put on the path."""
    distributions = packages_distributions()
    versions = {}
    for name, package in PACKAGES.items():
        if found(package):
            owners = distributions.get(package.partition(".")[0], [])
            versions[name] = ", ".join(f"{owner} {version(owner)}" for owner in dict.fromkeys(owners)) or "unknown"
    return versions


def chosen(section: str, only: Sequence[str] | None, slow: bool, flex: bool) -> list[Contender]:
    """Who runs a section: those named, or else all that are found and not optional unless asked for."""
    here = [c for c in REGISTRY.values() if section in c.makes]
    if only is not None:
        return [c for c in here if c.name in only]
    return [
        c
        for c in here
        if (c.package is None or found(c.package)) and (section not in c.optional or (flex if c.name == FLEX else slow))
    ]
